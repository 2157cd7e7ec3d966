"""What happens to a report on its way from a client to the update, a file for each feature.

Codecs, bounds, robust rules, secure sums, stale reports and personal layers are here. None knows a
method by its name: what may be done follows from `Reports`.
"""
