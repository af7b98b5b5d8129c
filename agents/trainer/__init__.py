"""The trainer's side: the barrier, the weight syncs, and the session that an application holds."""
