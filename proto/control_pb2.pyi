from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("role", "index", "host", "pid", "started")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    host: str
    pid: int
    started: str
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., started: _Optional[str] = ...) -> None: ...

class JobState(_message.Message):
    __slots__ = ("state", "message", "exit_code", "lost", "generation", "version", "moves")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    state: str
    message: str
    exit_code: int
    lost: bool
    generation: int
    version: int
    moves: int
    def __init__(self, state: _Optional[str] = ..., message: _Optional[str] = ..., exit_code: _Optional[int] = ..., lost: bool = ..., generation: _Optional[int] = ..., version: _Optional[int] = ..., moves: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("protocol_version", "member", "versions", "token")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    member: Member
    versions: _containers.ScalarMap[str, str]
    token: str
    def __init__(self, protocol_version: _Optional[int] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., token: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("config_yaml", "lease_s", "job", "formation", "kept", "run_dir", "shared")
    CONFIG_YAML_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    config_yaml: str
    lease_s: float
    job: str
    formation: Formation
    kept: Kept
    run_dir: str
    shared: Shared
    def __init__(self, config_yaml: _Optional[str] = ..., lease_s: _Optional[float] = ..., job: _Optional[str] = ..., formation: _Optional[_Union[Formation, _Mapping]] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ..., run_dir: _Optional[str] = ..., shared: _Optional[_Union[Shared, _Mapping]] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("host", "folder", "shared")
    HOST_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    host: str
    folder: str
    shared: bool
    def __init__(self, host: _Optional[str] = ..., folder: _Optional[str] = ..., shared: bool = ...) -> None: ...

class Shared(_message.Message):
    __slots__ = ("folder", "token", "needed_by", "proof_only")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BY_FIELD_NUMBER: _ClassVar[int]
    PROOF_ONLY_FIELD_NUMBER: _ClassVar[int]
    folder: str
    token: str
    needed_by: str
    proof_only: bool
    def __init__(self, folder: _Optional[str] = ..., token: _Optional[str] = ..., needed_by: _Optional[str] = ..., proof_only: bool = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "dim", "optimizer_json", "init_json", "dtype", "state_dtype", "admit_json", "evict_json", "freeze", "compression")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    INIT_JSON_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_JSON_FIELD_NUMBER: _ClassVar[int]
    EVICT_JSON_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    optimizer_json: str
    init_json: str
    dtype: str
    state_dtype: str
    admit_json: str
    evict_json: str
    freeze: bool
    compression: str
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., optimizer_json: _Optional[str] = ..., init_json: _Optional[str] = ..., dtype: _Optional[str] = ..., state_dtype: _Optional[str] = ..., admit_json: _Optional[str] = ..., evict_json: _Optional[str] = ..., freeze: bool = ..., compression: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("token", "offer", "wait_s", "after", "why", "kept")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    token: str
    offer: Offer
    wait_s: float
    after: int
    why: str
    kept: Kept
    def __init__(self, token: _Optional[str] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., wait_s: _Optional[float] = ..., after: _Optional[int] = ..., why: _Optional[str] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("tables", "data", "resume_range", "unseen", "settings_json")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RESUME_RANGE_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    data: str
    resume_range: ResumeRange
    unseen: str
    settings_json: str
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., data: _Optional[str] = ..., resume_range: _Optional[_Union[ResumeRange, _Mapping]] = ..., unseen: _Optional[str] = ..., settings_json: _Optional[str] = ...) -> None: ...

class ResumeRange(_message.Message):
    __slots__ = ("first", "last", "holds", "saved", "lost_from", "why", "part", "file", "byte")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    LOST_FROM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    BYTE_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    holds: bool
    saved: int
    lost_from: int
    why: str
    part: bool
    file: str
    byte: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., holds: bool = ..., saved: _Optional[int] = ..., lost_from: _Optional[int] = ..., why: _Optional[str] = ..., part: bool = ..., file: _Optional[str] = ..., byte: _Optional[int] = ...) -> None: ...

class Formation(_message.Message):
    __slots__ = ("generation", "store_host", "store_port", "members", "tables", "start_step", "source", "lacking", "origin", "data", "checkpoints", "journal")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    START_STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    store_host: str
    store_port: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    start_step: int
    source: int
    lacking: _containers.RepeatedScalarFieldContainer[int]
    origin: int
    data: str
    checkpoints: str
    journal: str
    def __init__(self, generation: _Optional[int] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., start_step: _Optional[int] = ..., source: _Optional[int] = ..., lacking: _Optional[_Iterable[int]] = ..., origin: _Optional[int] = ..., data: _Optional[str] = ..., checkpoints: _Optional[str] = ..., journal: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("job", "formation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    job: JobState
    formation: Formation
    def __init__(self, job: _Optional[_Union[JobState, _Mapping]] = ..., formation: _Optional[_Union[Formation, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("token", "step", "phase", "seen", "wait_s", "unsent_rows")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    UNSENT_ROWS_FIELD_NUMBER: _ClassVar[int]
    token: str
    step: int
    phase: str
    seen: int
    wait_s: float
    unsent_rows: int
    def __init__(self, token: _Optional[str] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., seen: _Optional[int] = ..., wait_s: _Optional[float] = ..., unsent_rows: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("token", "sequence", "kind", "record_json")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    token: str
    sequence: int
    kind: str
    record_json: str
    def __init__(self, token: _Optional[str] = ..., sequence: _Optional[int] = ..., kind: _Optional[str] = ..., record_json: _Optional[str] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("token", "point", "wait_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    POINT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    token: str
    point: int
    wait_s: float
    def __init__(self, token: _Optional[str] = ..., point: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("job", "met", "awaited")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    job: JobState
    met: bool
    awaited: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[_Union[JobState, _Mapping]] = ..., met: bool = ..., awaited: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("token", "code", "message", "symptom", "refused")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SYMPTOM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    token: str
    code: int
    message: str
    symptom: bool
    refused: bool
    def __init__(self, token: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., symptom: bool = ..., refused: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("wait_s",)
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    wait_s: float
    def __init__(self, wait_s: _Optional[float] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("role", "index", "host", "pid", "condition", "age_s", "step", "phase")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    host: str
    pid: int
    condition: str
    age_s: float
    step: int
    phase: str
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., condition: _Optional[str] = ..., age_s: _Optional[float] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("role", "index", "why", "host", "pid")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    why: str
    host: str
    pid: int
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., why: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("state", "message", "exit_code", "generation", "members", "progress_json", "evaluation_json", "summary_json", "events_json", "left_s", "telemetry_json", "missing")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_JSON_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_JSON_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_JSON_FIELD_NUMBER: _ClassVar[int]
    EVENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_JSON_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    state: str
    message: str
    exit_code: int
    generation: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    progress_json: str
    evaluation_json: str
    summary_json: str
    events_json: _containers.RepeatedScalarFieldContainer[str]
    left_s: float
    telemetry_json: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedCompositeFieldContainer[Missing]
    def __init__(self, state: _Optional[str] = ..., message: _Optional[str] = ..., exit_code: _Optional[int] = ..., generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., progress_json: _Optional[str] = ..., evaluation_json: _Optional[str] = ..., summary_json: _Optional[str] = ..., events_json: _Optional[_Iterable[str]] = ..., left_s: _Optional[float] = ..., telemetry_json: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[_Union[Missing, _Mapping]]] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class LostRequest(_message.Message):
    __slots__ = ("role", "index", "pid", "reason", "final")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    pid: int
    reason: str
    final: bool
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., pid: _Optional[int] = ..., reason: _Optional[str] = ..., final: bool = ...) -> None: ...
