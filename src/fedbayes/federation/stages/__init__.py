"""What happens to a report on its way from a client to the update, a file for each feature.

Codecs, bounds, robust rules, secure sums, stale reports and personal layers are here; `stage.py`
says what a stage is. Add a feature as a file, and ask `Reports.refusals` whether a method's reports
allow it. No file here knows a method by its name, and methods never see a stage: they get the sum
or the set of the reports.
"""
