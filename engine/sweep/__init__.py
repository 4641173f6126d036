"""Sweep of settings: Optuna chooses the values of each trial, and prunes trials while their engines train."""
