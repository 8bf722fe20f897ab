"""Chat templates: rendering messages as the text that a model was trained on."""
