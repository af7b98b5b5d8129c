"""The lifecycle of one engine for an application that steers for itself: look at it, end it, restart it."""
