"""A unit's exchange of rows between ranks that have experts: what a unit implements, and what a model calls."""

from __future__ import annotations

from pd_cluster.model.layers.expert_share import ExpertExchange as ExpertExchange
from pd_cluster.model.layers.expert_share import ExpertShare as ExpertShare
from pd_cluster.model.layers.expert_share import ExpertUnit as ExpertUnit
