"""Reports of schedules and timelines for people, predicted or measured.

text        figures of a schedule, and a timeline as text
svg         timelines as a picture
perfetto    timelines as a trace for ui.perfetto.dev
measured    the measured timeline of a step
"""
