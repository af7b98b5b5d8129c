"""Safeguards that are taken away, one line each: the simulation or the search must miss every one of them."""
