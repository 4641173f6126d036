"""Schedules, predicted or measured, for people: text, SVG, Perfetto."""
