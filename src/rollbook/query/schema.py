"""The columns of every view, in one place: what `--schema` prints and what the SQL is held to.

The keys that join are the same everywhere and have the names they have in the files; only the run's id is
`run` for short. `metrics` has, beside its fixed columns, one for every key of the metrics files.
"""

from __future__ import annotations

from typing import NamedTuple

from rollbook.records.token_columns import TOKEN_COLUMNS


class Column(NamedTuple):
    name: str
    type: str
    meaning: str


def _columns(text: str) -> tuple[Column, ...]:
    rows = (line.split(None, 2) for line in text.splitlines() if line)
    return tuple(Column(name, kind, meaning) for name, kind, meaning in rows)


_SQL = {"int32": "INTEGER", "bool": "BOOLEAN", "float32": "FLOAT"}
_RUN = "run VARCHAR the run's id, or the name of the directory or collection where there is none\n"
_PLACE = """
split VARCHAR train, eval/<name>, or collect for a collection
iteration BIGINT the batch about to be trained on
group_idx BIGINT the place of the problem in the batch; in a collection the row of the input
traj_idx BIGINT the place of the trajectory in its group; in a collection the repeat
"""
_TASK = """
task_id VARCHAR its own id, else a digest of what it shows; <id>~<8 hex> where several tasks have one id
task_digest VARCHAR of what the policy is shown: messages and tools
"""
_FILE = "file VARCHAR that the record is in\n"

MEANINGS = {
    "runs": "a run or a collection",
    "metrics": "a line of metrics.jsonl, or where there is none of trainer_log.jsonl, a column for every key",
    "rollouts": "a trajectory, or a row of a collection",
    "steps": "a turn of a trajectory",
    "transcripts": "a message of a trajectory",
    "tokens": "a token of a training row, from the token export; without one of a sampled row",
    "checkpoints": "a saved checkpoint",
    "failures": "a rollout that failed",
    "history": "a run of artifacts/index.yaml, whatever its kind",
}

COLUMNS: dict[str, tuple[Column, ...]] = {
    "runs": _columns(
        _RUN
        + """
kind VARCHAR rl, sft, eval, ... or collect, data
started_at TIMESTAMP UTC
ended_at TIMESTAMP of the newest attempt; UTC
outcome VARCHAR completed, failed, interrupted; empty while it runs or if it was killed
attempts BIGINT how many processes wrote it
total_iterations BIGINT as planned
expected BIGINT rollouts asked of a collection
ok BIGINT of these, done
failed BIGINT of these, given up
missing BIGINT of these, not there yet
host VARCHAR where it ran
config JSON config.json; of a collection what gives its rows their meaning
"""
        + _FILE
    ),
    "metrics": _columns(
        _RUN
        + """
step BIGINT the iteration, under the name the file has for it
iteration BIGINT the same, for joins
"""
        + _FILE
    ),
    "rollouts": _columns(
        _RUN
        + _PLACE
        + _TASK
        + """
status VARCHAR ok or error
reward DOUBLE the total; empty for a failure
final_reward DOUBLE the part given to the whole episode
turns BIGINT how many
input_tokens BIGINT of all prompts together
output_tokens BIGINT of all replies together
stop_reason VARCHAR stop, length, max_length, max_turns, ...
error VARCHAR why it failed
tags VARCHAR[] of the environment
truncated BOOLEAN cut off by a limit of tokens or turns
key VARCHAR of a collected row its own name, <task>#<repeat>
model VARCHAR who answered, where the record says
sampling_client_step BIGINT how many updates the sampling weights had
metrics JSON what was measured on it: of a metric of its turns the last value
row JSON the whole record; only there when a query names it
"""
        + _FILE
    ),
    "steps": _columns(
        _RUN
        + _PLACE
        + "step_idx BIGINT the turn\n"
        + _TASK
        + """
ob_len BIGINT tokens seen
ac_len BIGINT tokens generated
reward DOUBLE of this turn
episode_done BOOLEAN whether it was the last
metrics JSON of the environment
logs JSON of the environment
"""
        + _FILE
    ),
    "transcripts": _columns(
        _RUN
        + _PLACE
        + "step_idx BIGINT the turn; messages of the prompt have none\n"
        + _TASK
        + """
message_idx BIGINT the place in the conversation
role VARCHAR system, user, assistant, tool
content VARCHAR its text
reasoning VARCHAR reasoning text before the reply
tool_calls JSON what was called
message JSON as it was written
"""
        + _FILE
    ),
    "tokens": (
        *_columns(
            _RUN
            + "attempt BIGINT the process that wrote it; 1 is the first start\n"
            + _PLACE
            + "part BIGINT the training row of the trajectory: 0, unless its conversation was rewritten\n"
            + "data_file VARCHAR of a fine-tuning: the file of the row\n"
            + "data_row BIGINT its line there, or row of a Parquet file, from 1\n"
            + "task_id VARCHAR the task's own id\n"
            + """
step_idx BIGINT the turn that sampled it; empty for tokens of prompts and tools
token_idx BIGINT its place in the row
text VARCHAR the token as text; a part of a character as its bytes, such as \\xE6
policy_version BIGINT how many updates the sampling weights had
temperature FLOAT at which it was sampled
env_name VARCHAR the environment
rank BIGINT of the trainer's process
optim_step BIGINT of the iteration
micro_step BIGINT the micro-batch of this process
micro_sequence_idx BIGINT the row in its micro-batch
sequence_idx BIGINT the record among those of its process and iteration
"""
        ),
        *(Column(column.name, _SQL[column.kind], column.meaning) for column in TOKEN_COLUMNS),
        *_columns(_FILE),
    ),
    "checkpoints": _columns(
        _RUN
        + """
iteration BIGINT iteration to resume at
name VARCHAR unique in a run
epoch DOUBLE where given
final BOOLEAN whether it ends the run
state_path VARCHAR relative to the run directory
sampler_path VARCHAR relative to the run directory
saved_at TIMESTAMP UTC
row JSON the whole record
"""
        + _FILE
    ),
    "failures": _columns(
        _RUN
        + _PLACE
        + _TASK
        + """
kind VARCHAR the kind of failure, or the exception
message VARCHAR what it said
http_status BIGINT of the answer, if there was one
attempts JSON what was tried
failed_at TIMESTAMP UTC
"""
        + _FILE
    ),
    "history": _columns(
        """
run VARCHAR the id in the history
name VARCHAR as it was called
kind VARCHAR rl, sft, collect, run, ...
status VARCHAR running, completed, failed, interrupted or lost
started_at TIMESTAMP UTC
completed_at TIMESTAMP UTC
duration_s DOUBLE how long it took
exit_code BIGINT 128 + n for a process that died of signal n
reason VARCHAR why it ended as it did
host VARCHAR where it ran
user VARCHAR who started it
output_dir VARCHAR what it wrote, relative to the directory that holds artifacts/
checkpoint JSON path and step of the last one
metrics JSON its last metrics
git JSON sha, dirty, branch
error JSON type and message
command JSON as it was typed
notes JSON what people noted on it
row JSON the whole record
"""
        + _FILE
    ),
}

VIEWS = tuple(COLUMNS)
