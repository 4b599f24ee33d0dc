"""Builds a simulated instance like engine/assembly/build_worker.py, but without model, bytes and sockets."""

from __future__ import annotations

import msgspec

from pd_cluster import wire
from pd_cluster.costs.linear_costs import Costs
from pd_cluster.engine.handover.handover import HandoverTerms
from pd_cluster.engine.handover.handover_context import HandoverContext
from pd_cluster.engine.handover.links.link_ends import LocalEndpoint
from pd_cluster.engine.leg_trace import Tracer
from pd_cluster.engine.legs.legs import Legs
from pd_cluster.engine.lifecycle.availability import Availability
from pd_cluster.engine.lifecycle.engine_sleep import EngineSleep
from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.stages.cache_reports import CacheReports
from pd_cluster.engine.stages.prefix_pulls import PrefixPulls
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.engine.step.step_timing import StepTiming
from pd_cluster.engine.worker.worker import Cores, Worker
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.net.peer_admission import peer_key
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.simulate.simulated_instance import SimulatedInstance, SimulationContext
from pd_cluster.simulate.simulated_lanes import Cables, SimulatedLanes
from pd_cluster.simulate.simulated_layout import SimulatedLayout
from pd_cluster.simulate.simulated_runner import VOCAB_SIZE, HostPlans, SimulatedRunner
from pd_cluster.types import Role

MODEL = "simulated"
KEY = b"k" * wire.KEY_NBYTES
LONG_S = 1e6  # in a simulation silence is no sign of loss, so transfers that wait for capacity never time out
NUMERICS = Numerics()


class Assembly:
    """Builds lives of instances, which are all equal."""

    def __init__(self, layout: SimulatedLayout, costs: Costs) -> None:
        self.costs = msgspec.structs.replace(
            costs,
            max_num_batched_tokens=layout.max_num_batched_tokens or costs.max_num_batched_tokens,
            max_num_seqs=layout.max_num_seqs or costs.max_num_seqs,
            num_blocks=layout.num_blocks or costs.num_blocks,
        )
        self.shares_cores, self._pulls = layout.are_neighbours, layout.pulls_prefixes
        width = max(1, costs.kv_token_nbytes // 4)  # the number of keys, and of values; each has 2 bytes
        self.kv_layout = KVLayout(1, 1, keys_and_values(width), costs.block_size, "bfloat16")
        self.timeouts = Timeouts(credit_timeout_s=LONG_S, transfer_timeout_s=LONG_S, link_keepalive_s=LONG_S)
        self._growth_tokens = EngineConfig(model="").growth_tokens

    def info(self, name: str, role: Role, epoch: int) -> InstanceInfo:
        """Returns the announcement of a life."""
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
            max_num_batched_tokens=self.costs.max_num_batched_tokens,
        )

    def build(
        self, info: InstanceInfo, around: SimulationContext, cables: Cables, speed: float = 1.0
    ) -> SimulatedInstance:
        """Builds a life. `speed`: the factor by which steps take longer."""
        peer, costs = peer_key(info.name, info.epoch), self.costs
        life = SimulatedInstance(info.name, peer, around, speed)
        runner = SimulatedRunner(costs, life.began)
        prefix = PrefixScope(MODEL, NUMERICS)
        timing = StepTiming(life.clock)
        sizes = StepSizes(costs.block_size, costs.max_num_seqs, costs.max_num_batched_tokens, cost=lambda: timing.cost)
        scheduler = StepScheduler([LayerGroup(BlockPool(costs.num_blocks))], sizes, prefix)
        core = EngineCore(runner, scheduler, timing, drafting=HostPlans(scheduler, ()))
        endpoint = LocalEndpoint(peer, b"", MODEL, NUMERICS, (self.kv_layout,), (costs.num_blocks,), wire.KVOptions())
        lanes = SimulatedLanes(cables, life.wires, self.kv_layout, life.post.send, life.later)
        context = HandoverContext(
            endpoint,
            life.post,
            lanes,
            life.put,
            self.timeouts,
            life.clock,
            Tracer(life.clock),
            pulls_prefixes=self._pulls,
        )
        terms = HandoverTerms(info.role == "prefill", self._growth_tokens, VOCAB_SIZE)
        legs = Legs.of(context, core, EngineLimits(VOCAB_SIZE, VOCAB_SIZE, RopeLimit()), terms)
        drain = WorkerDrain(self.timeouts.drain_timeout_s, life.clock)
        state = Availability(drain, EngineSleep(None, scheduler.forget))
        pulls = [PrefixPulls(scheduler, legs, life.clock)] if self._pulls else []
        stages: list[Stage] = [*pulls, CacheReports(life.post, scheduler.known)]
        life.power_on(Worker(core, legs, stages, state, context, Cores(self.shares_cores)), runner)
        return life
