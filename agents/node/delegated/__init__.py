"""Engines that an application starts when it is asked to: the agent's side, the application's, their wire."""
