"""Makes the parts of a text service that answer with vectors, scores and classes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pd_cluster.cluster.routing.router import Router
from pd_cluster.service.generation.generation_watch import GenerationWatch
from pd_cluster.service.pooling.classifier import Classifier
from pd_cluster.service.pooling.embedder import Embedder, EmbedderRules
from pd_cluster.service.pooling.label_scoring import LabelScorer
from pd_cluster.service.pooling.reranking import Reranker
from pd_cluster.service.pooling.scoring import Scorer
from pd_cluster.service.preprocessing.request_preprocessor import RequestPreprocessor
from pd_cluster.service.prompts.guarded_prompt import ControlTokenGuard
from pd_cluster.settings.request_settings import PoolerConfig


class Poolers(NamedTuple):
    scorer: Scorer
    embedder: Embedder
    classifier: Classifier
    label_scorer: LabelScorer


def poolers_of(
    router: Router,
    intake: RequestPreprocessor,
    guard: ControlTokenGuard | None,
    folder: Path,
    log: GenerationWatch | None,
    settings: PoolerConfig,
) -> Poolers:
    """`folder`: the checkpoint's."""
    encoder, has_priorities, vocab_size = intake.encoder, intake.has_priorities, intake.limits.vocab_size
    embedder = Embedder(router, encoder, EmbedderRules(vocab_size, folder, has_priorities, settings), log)
    return Poolers(
        Scorer(embedder, Reranker(encoder, guard, has_priorities), encoder, folder),
        embedder,
        Classifier(embedder, folder),
        LabelScorer(encoder, has_priorities, vocab_size),
    )
