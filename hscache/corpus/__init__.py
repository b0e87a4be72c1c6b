"""Turn inputs into samples: file formats, chat templates, completions written by the target itself."""
