"""The node agent: it owns a machine's engines of one job. What it says of processes is true or `unknown`."""
