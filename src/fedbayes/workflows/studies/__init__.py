"""Regression and survival analysis over clients' tables, wherever they are."""
