"""Pooling requests, which compute prompts without generating: embeddings, scores, reranking."""
