"""pd-cluster: disaggregated prefill/decode serving for large language models."""

__version__ = "0.1.0"
