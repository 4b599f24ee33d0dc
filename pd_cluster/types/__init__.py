"""Types that the whole project shares: a request, its sampling parameters, and its output.

Imports nothing of devices, sockets or HTTP. Units are in the names; `_s` is seconds of a monotonic clock.
"""

from __future__ import annotations

from pd_cluster.types.engine_request import OWN as OWN
from pd_cluster.types.engine_request import Request as Request
from pd_cluster.types.engine_request import Retention as Retention
from pd_cluster.types.engine_request import StateCopy as StateCopy
from pd_cluster.types.engine_request import Status as Status
from pd_cluster.types.engine_request import resume as resume
from pd_cluster.types.engine_request import sibling as sibling
from pd_cluster.types.link_state import LinkPhase as LinkPhase
from pd_cluster.types.link_state import LinkState as LinkState
from pd_cluster.types.request_outputs import INT32_MAX as INT32_MAX
from pd_cluster.types.request_outputs import MAX_UNSENT as MAX_UNSENT
from pd_cluster.types.request_outputs import Candidate as Candidate
from pd_cluster.types.request_outputs import DraftReport as DraftReport
from pd_cluster.types.request_outputs import FinishReason as FinishReason
from pd_cluster.types.request_outputs import LegEnd as LegEnd
from pd_cluster.types.request_outputs import Logprobs as Logprobs
from pd_cluster.types.request_outputs import PooledOutput as PooledOutput
from pd_cluster.types.request_outputs import PromptOutput as PromptOutput
from pd_cluster.types.request_outputs import Resumed as Resumed
from pd_cluster.types.request_outputs import TokenId as TokenId
from pd_cluster.types.request_outputs import TokenOutput as TokenOutput
from pd_cluster.types.request_sampling import MAX_EXTRA_ARGS_NUM_CHARS as MAX_EXTRA_ARGS_NUM_CHARS
from pd_cluster.types.request_sampling import MAX_GUIDE_NUM_CHARS as MAX_GUIDE_NUM_CHARS
from pd_cluster.types.request_sampling import MAX_SEQUENCES as MAX_SEQUENCES
from pd_cluster.types.request_sampling import NO_SAMPLING as NO_SAMPLING
from pd_cluster.types.request_sampling import Guide as Guide
from pd_cluster.types.request_sampling import GuideKind as GuideKind
from pd_cluster.types.request_sampling import Range as Range
from pd_cluster.types.request_sampling import Sampling as Sampling
from pd_cluster.types.request_sampling import ShapesDraws as ShapesDraws
from pd_cluster.types.request_spec import MAX_POOLED_TOKEN_IDS as MAX_POOLED_TOKEN_IDS
from pd_cluster.types.request_spec import Image as Image
from pd_cluster.types.request_spec import Pooling as Pooling
from pd_cluster.types.request_spec import PoolingKind as PoolingKind
from pd_cluster.types.request_spec import RequestSpec as RequestSpec
from pd_cluster.types.request_spec import RopePositions as RopePositions
from pd_cluster.types.request_spec import Span as Span
from pd_cluster.types.roles import ROLES as ROLES
from pd_cluster.types.roles import TIERS as TIERS
from pd_cluster.types.roles import Leg as Leg
from pd_cluster.types.roles import Role as Role
from pd_cluster.types.roles import Tier as Tier
from pd_cluster.types.transfer_notes import Note as Note
from pd_cluster.types.transfer_notes import note_nothing as note_nothing
