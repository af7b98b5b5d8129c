"""How fast the orchestrator's core is, on a real server with orchestrators in processes of their own."""
