"""Extensions: one folder a feature, whole. Each can be deleted, and everything else works."""
