"""From text to tokens and back: tokenizers, templates, grammars."""
