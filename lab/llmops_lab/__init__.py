"""The lab: simulated machines that the demo and the tests run on. Python's standard library only."""
