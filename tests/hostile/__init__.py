"""What hostile clients, kills and damaged files are tried on: `python -m tests.hostile`."""
