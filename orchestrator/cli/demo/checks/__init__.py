"""The audit's checks, by what they speak of. Pure: each takes the decoded evidence and gives a verdict."""
