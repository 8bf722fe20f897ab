"""Looking inside: comparisons of keys and values, the logit lens, and a report as one HTML page."""
