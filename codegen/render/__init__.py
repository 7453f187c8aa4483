"""From a plan to files: templates, the manifest, and publishing them."""
