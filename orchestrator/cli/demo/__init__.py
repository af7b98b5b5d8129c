"""`relight demo`: an engine is killed in mid-generation, nobody helps, and an audit says what is true of it.

The demo starts relight through the commands that a user would run and then only keeps them running, like
any service manager. It injects the fault, watches the bus, looks at processes and engines for itself,
and lets a list of pure checks judge what it saw.
"""
