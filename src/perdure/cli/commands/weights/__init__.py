"""Commands about weights: files made from others, trained, judged, fitted to a machine, looked into."""
