"""Puts a simulated instance together: everything of engine/build_worker.py but the model, the bytes and the sockets."""

from __future__ import annotations

import msgspec

from pd_cluster import wire
from pd_cluster.costs.costs import Costs
from pd_cluster.engine.availability import Availability
from pd_cluster.engine.cache_news import CacheNews
from pd_cluster.engine.drain import WorkerDrain
from pd_cluster.engine.handover.context import HandoverContext
from pd_cluster.engine.handover.handover import HandoverTerms
from pd_cluster.engine.handover.links import Side
from pd_cluster.engine.legs import Legs
from pd_cluster.engine.sleep import EngineSleep
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.engine.step.group import LayerGroup
from pd_cluster.engine.step.limits import EngineLimits
from pd_cluster.engine.step.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.trace import Tracer
from pd_cluster.engine.worker import Cores, Worker
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.model.rope_limit import RopeLimit
from pd_cluster.net.admission import peer_key
from pd_cluster.numerics import Numerics
from pd_cluster.reports import InstanceInfo
from pd_cluster.settings.engine import EngineConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.simulate.instance import SimulatedInstance, Surroundings
from pd_cluster.simulate.lanes import Cables, SimulatedLanes
from pd_cluster.simulate.runner import VOCAB_SIZE, HostPlans, PricedRunner
from pd_cluster.simulate.scenario import SimulatedLayout
from pd_cluster.types import Role

MODEL = "simulated"
KEY = b"k" * wire.KEY_NBYTES
LONG_S = 1e6  # no life is lost by silence here, so a transfer that waits for room is never given up
NUMERICS = Numerics()


class Assembly:
    """Builds lives of instances that are alike."""

    def __init__(self, layout: SimulatedLayout, costs: Costs) -> None:
        self.costs = msgspec.structs.replace(
            costs,
            max_num_batched_tokens=layout.max_num_batched_tokens or costs.max_num_batched_tokens,
            max_num_seqs=layout.max_num_seqs or costs.max_num_seqs,
            num_blocks=layout.num_blocks or costs.num_blocks,
        )
        self.shares_cores = layout.are_neighbours
        width = max(1, costs.kv_token_nbytes // 4)  # of keys, and of values, of 2 bytes each
        self.kv_layout = KVLayout(1, 1, keys_and_values(width), costs.block_size, "bfloat16")
        self.timeouts = Timeouts(credit_timeout_s=LONG_S, transfer_timeout_s=LONG_S, link_keepalive_s=LONG_S)
        self._growth_tokens = EngineConfig(model="").growth_tokens

    def info(self, name: str, role: Role, epoch: int) -> InstanceInfo:
        """Returns what this life says of itself."""
        return InstanceInfo(
            name=name,
            role=role,
            state="ready",
            server_ip="127.0.0.1",
            device_ids=["0"],
            epoch=epoch,
            pid=1,
            public_key=KEY,
            model_identity=MODEL,
            numerics=NUMERICS,
            max_model_len=VOCAB_SIZE,
            layout=self.kv_layout.to_info(),
            num_blocks=self.costs.num_blocks,
            max_num_seqs=self.costs.max_num_seqs,
        )

    def build(self, info: InstanceInfo, around: Surroundings, cables: Cables, speed: float = 1.0) -> SimulatedInstance:
        """`speed`: times the costs that a step takes."""
        peer, costs = peer_key(info.name, info.epoch), self.costs
        life = SimulatedInstance(info.name, peer, around, speed)
        runner = PricedRunner(costs, life.began)
        prefix = PrefixScope(MODEL, NUMERICS)
        sizes = StepSizes(costs.block_size, costs.max_num_seqs, costs.max_num_batched_tokens)
        scheduler = StepScheduler([LayerGroup(BlockPool(costs.num_blocks))], sizes, prefix)
        core = EngineCore(runner, scheduler, life.clock, drafting=HostPlans(scheduler, ()))
        side = Side(peer, b"", MODEL, NUMERICS, (self.kv_layout,), (costs.num_blocks,), wire.KVOptions())
        lanes = SimulatedLanes(cables, life.wires, self.kv_layout, life.post.send, life.later)
        context = HandoverContext(side, life.post, lanes, life.put, self.timeouts, life.clock, Tracer(life.clock))
        terms = HandoverTerms(info.role == "prefill", self._growth_tokens, VOCAB_SIZE)
        legs = Legs.of(context, core, EngineLimits(VOCAB_SIZE, VOCAB_SIZE, RopeLimit()), terms)
        drain = WorkerDrain(self.timeouts.drain_timeout_s, life.clock)
        state = Availability(drain, EngineSleep(None, scheduler.forget))
        stages = [CacheNews(life.post, scheduler.known)]
        life.power_on(Worker(core, legs, stages, state, context, Cores(self.shares_cores)), runner)
        return life
