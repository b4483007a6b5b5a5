"""The client's side: a mod between Flower and an app that trains a whole model and returns it.

The app receives `arrays` and `config` as usual, and replies with the trained arrays; the mod turns them into the
core's messages. In addition to `server-round`, the config contains `client` and `seed`, from which an app can derive
the simulator's exact random numbers, and `local-rate`, the local learning rate of the round. For a method with control
variates, the app also receives the arrays `fedcams.shift`, which it adds to each gradient.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedcams.compress import Compressor, compressor
from fedcams.downlink import BUFFERS
from fedcams.durable import private_folder
from fedcams.errors import FedcamsError, SpecError, UpdateError
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.records import (
    ABOUT,
    INSTRUCTION,
    REPLY,
    about,
    about_of,
    message_parts,
    message_record,
)
from fedcams.flower.training import AppFailed, Training, without_reasons
from fedcams.method import Method
from fedcams.privacy import Privacy
from fedcams.rounds.durable import Answer, DurableClient, OtherClient
from fedcams.rounds.messages import PROTOCOL, Refusal, check_protocol
from fedcams.runs.files import disk_errors, locked

if TYPE_CHECKING:
    from torch import Tensor

SITE = ("site-id", "partition-id")
"""The keys in a node's configuration that say which site it is; the first one present counts."""
UNLIMITED = 2**63
NO_INITIAL = "warm=true, but this site cannot make the initial model; give uplink(initial=...) to receive only changes"
Initial = Callable[[Context], ArrayRecord]
"""Returns the arrays that the server's `start` was given, made at the site: from the same seed, or from a file."""


@dataclass(frozen=True)
class Uplink:
    """Compresses the update of an app's training, with error feedback that survives restarts of process and machine."""

    compressor: Compressor | None
    state_dir: Path
    arrays_key: str | None
    config_key: str | None
    initial: Initial | None = None
    privacy: Privacy | None = None

    def __call__(self, message: Message, context: Context, app: ClientAppCallable) -> Message:
        """Handle a message as a Flower mod; other messages than ours, such as evaluations, go to the app unchanged."""
        told = about_of(message.content) if message.has_content() else None
        if told is None and self.privacy is None:
            return app(message, context)
        try:
            if told is None:
                raise SpecError(
                    f"this site adds noise, privacy={self.privacy}: it answers only FedCAMS, and only requests to train"
                )
            check_protocol(told.get("protocol"), "the server")
            site = site_of(context)
            if told.get("kind") == "greeting":
                return _reply(message, about(site=site, protocol=PROTOCOL))
            return self._train(message, context, app, site)
        except AppFailed as failed:
            return failed.reply
        except OtherClient:  # since the server greeted this node, it was restarted as another site
            return _reply(message, about(site=site))
        except FedcamsError as error:
            return _reply(message, about(refused=f"{type(error).__name__}: {error}"))

    def _train(self, message: Message, context: Context, app: ClientAppCallable, site: int) -> Message:
        content = message.content
        told, names = content.config_records[ABOUT], ArrayNames.from_json(str(content.config_records[ABOUT]["model"]))
        parts = message_parts(content.array_records.pop(INSTRUCTION), UNLIMITED)
        folder = self._folder(told, site)
        with locked(folder):  # a killed SuperNode may have left a process that is still training
            client = self._client(folder, told, names, site)
            lacking = self._start_warm(client, context, names, site)
            method = client.client.method
            run = Training(message, context, app, names, self, method.weighting)
            hides = method.privacy.at_client
            answer = client.answer(parts, without_reasons(run) if hides else run)
        # in one part: each additional one adds more than a kilobyte of Flower's own traffic
        records = RecordDict({REPLY: message_record([answer.reply.to_bytes()]), ABOUT: _note(answer, lacking)})
        records.update({} if hides else run.others)
        return Message(records, reply_to=message)

    def _folder(self, told: ConfigRecord, site: int) -> Path:
        folder = self.state_dir / safe_name(str(told["run"])) / str(site)
        with disk_errors("make", folder):
            private_folder(folder)
        return folder

    def _client(self, folder: Path, told: ConfigRecord, names: ArrayNames, site: int) -> DurableClient:
        method = self._as_pinned(Method.from_dict(json.loads(str(told["method"]))))
        rounds, population = int(str(told["rounds"])) or None, int(str(told["clients"]))
        return DurableClient(folder, method, names.layout, names.buffer_layout, rounds, population, site)

    def _as_pinned(self, method: Method) -> Method:
        """Return the server's method with this site's compressor; refuses another privacy than the site's."""
        if self.privacy not in (None, method.privacy):
            raise SpecError(
                f"privacy={method.privacy}, but this site adds privacy={self.privacy}; start the server with that, or "
                "change uplink(privacy=...)"
            )
        if self.compressor in (None, method.uplink):
            return method
        if method.privacy.at_client:
            raise SpecError(
                f"uplink({str(self.compressor)!r}), but the server's epsilon is that of uplink={method.uplink}; "
                "leave the compressor of the mod out"
            )
        return dataclasses.replace(method, uplink=self.compressor)

    def _start_warm(self, client: DurableClient, context: Context, names: ArrayNames, site: int) -> str:
        """Give the initial model to a site that holds nothing yet, if its downlink starts warm.

        Returns why it cannot, or an empty string. A site that does not hold what the server assumes says so and gets
        the dense model in the same round, so a model whose bits differ costs only bytes.
        """
        held = client.client.held
        if held is None or not client.client.method.downlink.starts_warm or held.held(site) or held.staged(site):
            return ""
        if self.initial is None:
            return NO_INITIAL
        x, buffers = _vectors(self.initial(context), names)
        held.start(site, x, buffers if BUFFERS in held.layouts else None)
        return ""


def uplink(
    spec: str | Compressor | None = None,
    *,
    state_dir: str | os.PathLike[str],
    arrays_key: str | None = None,
    config_key: str | None = None,
    initial: Initial | None = None,
    privacy: str | Privacy | None = None,
) -> Uplink:
    """Return a mod that compresses updates with `spec`, or with the strategy's uplink if `spec` is None.

    Arguments:
        spec: a compressor, or its spec string.
        state_dir: where residuals are kept, in `<run>/<site>`; choose a folder that survives restarts of the machine.
        arrays_key: where the app expects the model's arrays; by default the strategy's `arrayrecord_key`.
        config_key: where the app expects its configuration; by default the strategy's `configrecord_key`.
        initial: takes the context and returns the arrays that the server starts from. With `warm=true` in the downlink,
            the first message then carries only what has changed since. If its bits differ, the dense model follows.
        privacy: the privacy that this site requires, such as `client(clip=1, noise=2)`. It then refuses methods with
            another privacy and all messages that are not from `FedCAMS`, so that no server can turn its noise off.

    Returns:
        A mod for `ClientApp(mods=[...])`.

    Raises:
        SpecError: for an unknown compressor or privacy.

    Examples:
        >>> from fedcams.flower import uplink
        >>> str(uplink("sign", state_dir="/var/lib/fedcams").compressor)
        'sign'
    """
    codec, noise = None if spec is None else compressor(spec), None if privacy is None else Privacy.parse(privacy)
    return Uplink(codec, Path(state_dir), arrays_key, config_key, initial, noise)


def site_of(context: Context) -> int:
    """Return the client id of this node, from its configuration; refuses a missing or invalid one."""
    for key in SITE:
        if key in context.node_config:
            value = context.node_config[key]
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
                return value
            raise SpecError(f"node-config {key}={value!r}; allowed: an integer from 0 to 2**63 - 1")
    raise SpecError(f"node-config has none of {', '.join(SITE)}; start the SuperNode with --node-config 'site-id=0'")


def safe_name(run: str) -> str:
    """Return a run's name, which names a folder too; refuses names that the server could use to leave that folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run):
        raise SpecError(
            f"run={run!r}: allowed are up to 100 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return run


def _vectors(made: object, names: ArrayNames) -> tuple[Tensor, Tensor | None]:
    """The parameters and buffers of the initial arrays that an app made; refuses those of another model."""
    if not isinstance(made, ArrayRecord):
        raise SpecError(f"initial returned a {type(made).__name__}; return ArrayRecord(model.state_dict())")
    try:
        return names.vectors(ArrayRecord(dict(made)))
    except UpdateError as error:
        raise SpecError(f"initial returned a different model from the server's: {error}") from None


def _note(answer: Answer, lacking: str) -> ConfigRecord:
    missed = lacking if isinstance(answer.reply, Refusal) else ""  # a reply shows that the dense model arrived
    notes = "; ".join(filter(None, ["repeated" if answer.again else "", answer.note, missed]))
    return about(note=notes) if notes else about()  # Flower's message_size_mod fails on empty texts


def _reply(message: Message, told: ConfigRecord) -> Message:
    return Message(RecordDict({ABOUT: told}), reply_to=message)
