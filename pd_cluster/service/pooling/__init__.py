"""Prompts that are computed and not continued: embeddings, scores, reranking."""
