"""A page for those who look after many jobs: what the bus says of them, live, and nothing that changes it."""
