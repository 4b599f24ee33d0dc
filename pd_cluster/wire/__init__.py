"""Every message between processes: msgspec structs, msgpack on the wire, nothing else.

docs/protocol.md describes each message: its meaning, its sender and its effects. Decoding checks types and sizes; a
frame that is not one of these raises `msgspec.DecodeError` and is dropped by the mailbox.
"""

from __future__ import annotations

from pd_cluster.wire.base import KEY_NBYTES as KEY_NBYTES
from pd_cluster.wire.base import MAX_MESSAGE_NBYTES as MAX_MESSAGE_NBYTES
from pd_cluster.wire.base import MAX_OFFER_NBYTES as MAX_OFFER_NBYTES
from pd_cluster.wire.base import PROTOCOL_VERSION as PROTOCOL_VERSION
from pd_cluster.wire.base import KVWireDtype as KVWireDtype
from pd_cluster.wire.base import Message as Message
from pd_cluster.wire.base import PairWish as PairWish
from pd_cluster.wire.base import PublicKey as PublicKey
from pd_cluster.wire.base import ShortText as ShortText
from pd_cluster.wire.base import TransportName as TransportName
from pd_cluster.wire.envelope import Body as Body
from pd_cluster.wire.envelope import Envelope as Envelope
from pd_cluster.wire.envelope import decode as decode
from pd_cluster.wire.envelope import decode_header as decode_header
from pd_cluster.wire.envelope import encode as encode
from pd_cluster.wire.envelope import encode_body as encode_body
from pd_cluster.wire.envelope import encode_header as encode_header
from pd_cluster.wire.envelope import seal as seal
from pd_cluster.wire.links import KVOptions as KVOptions
from pd_cluster.wire.links import LaneOffer as LaneOffer
from pd_cluster.wire.links import LayoutInfo as LayoutInfo
from pd_cluster.wire.links import LinkAnswer as LinkAnswer
from pd_cluster.wire.links import LinkOpen as LinkOpen
from pd_cluster.wire.links import LinkQueued as LinkQueued
from pd_cluster.wire.links import LinkReady as LinkReady
from pd_cluster.wire.links import LinkRefused as LinkRefused
from pd_cluster.wire.links import LinkRest as LinkRest
from pd_cluster.wire.links import LinkValue as LinkValue
from pd_cluster.wire.links import LinkYield as LinkYield
from pd_cluster.wire.links import Plane as Plane
from pd_cluster.wire.links import TransportOffer as TransportOffer
from pd_cluster.wire.membership import PREEMPTIONS_BOUNDS as PREEMPTIONS_BOUNDS
from pd_cluster.wire.membership import STEP_TOKENS_BOUNDS as STEP_TOKENS_BOUNDS
from pd_cluster.wire.membership import AdapterPlace as AdapterPlace
from pd_cluster.wire.membership import AdapterStates as AdapterStates
from pd_cluster.wire.membership import Gone as Gone
from pd_cluster.wire.membership import Heartbeat as Heartbeat
from pd_cluster.wire.membership import Hello as Hello
from pd_cluster.wire.membership import Join as Join
from pd_cluster.wire.membership import JoinAnswer as JoinAnswer
from pd_cluster.wire.membership import Leave as Leave
from pd_cluster.wire.membership import Load as Load
from pd_cluster.wire.membership import PeerInfo as PeerInfo
from pd_cluster.wire.membership import Peers as Peers
from pd_cluster.wire.membership import ResetCache as ResetCache
from pd_cluster.wire.membership import Sleep as Sleep
from pd_cluster.wire.membership import SleepLevel as SleepLevel
from pd_cluster.wire.membership import StaleOrder as StaleOrder
from pd_cluster.wire.membership import Tally as Tally
from pd_cluster.wire.membership import WantedAdapters as WantedAdapters
from pd_cluster.wire.membership import Welcome as Welcome
from pd_cluster.wire.requests import Abort as Abort
from pd_cluster.wire.requests import CacheKeys as CacheKeys
from pd_cluster.wire.requests import Outputs as Outputs
from pd_cluster.wire.requests import Submit as Submit
from pd_cluster.wire.requests import TraceEvent as TraceEvent
from pd_cluster.wire.resume import PROMPT_TOKEN_NBYTES as PROMPT_TOKEN_NBYTES
from pd_cluster.wire.resume import Attach as Attach
from pd_cluster.wire.resume import Find as Find
from pd_cluster.wire.resume import Found as Found
from pd_cluster.wire.resume import Keep as Keep
from pd_cluster.wire.resume import Release as Release
from pd_cluster.wire.resume import nbytes_of as nbytes_of
from pd_cluster.wire.transfers import Cancel as Cancel
from pd_cluster.wire.transfers import Confirm as Confirm
from pd_cluster.wire.transfers import Confirmed as Confirmed
from pd_cluster.wire.transfers import Credit as Credit
from pd_cluster.wire.transfers import KVChunk as KVChunk
from pd_cluster.wire.transfers import KVEnd as KVEnd
from pd_cluster.wire.transfers import KVFrame as KVFrame
from pd_cluster.wire.transfers import KVHeader as KVHeader
from pd_cluster.wire.transfers import KVPiece as KVPiece
from pd_cluster.wire.transfers import KVProbe as KVProbe
from pd_cluster.wire.transfers import Offer as Offer
from pd_cluster.wire.transfers import Revoke as Revoke
