"""Identities of the two ends: enrolment by a code, the handshake's signatures, and the renewal of keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from paceline.errors import LocalProtocolError
from paceline.wire import messages
from paceline.wire.close_codes import CloseCode, remote_fault
from paceline.wire.codec import decode_part, encode, encode_part
from paceline.wire.effects import Claim, Effect, KeepKey, MakeKey, SettleKey, Signer, Transmit, Verify, signed_bytes
from paceline.wire.messages import VERSION, Introduction, Message

# Enrolment: a one-time code authenticates the device's public key to the server and the server's to the device. Pure.
#
# Both derive two secrets from the code: the seed of an Ed25519 key and the key of a MAC. The device signs its request
# with the first, so that only who knows the code has a key enrolled; the server answers with the MAC, so that only who
# issued the code has its key pinned. Each public key also signs, as proof that its private one is held. Somebody in
# between can change no byte of either, and guessing the 59 secret bits of a code from what he has seen costs one
# scrypt a guess.
#
# The server stores what the code's owner can be recognised by, the public key and the MAC key; neither lets anyone in.


ALPHABET = "23456789ABCDEFGHJKMNPQRSTUVWXYZ"  # no 0 O 1 I L, which look alike
GROUPS = 4  # of a code; the first is public, by which the code is looked up
GROUP_LETTERS = 4
CODE = re.compile(f"[{ALPHABET}]{{{GROUPS * GROUP_LETTERS}}}")
SCRYPT_COST = 1 << 14  # 16 MiB and some 0.1 s a guess, with r = 8 and p = 1
CODE_SALT = "enrolment code"  # purpose
BY_CODE, BY_DEVICE, BY_SERVER = "enrolment by code", "enrolment by device", "enrolment by server"  # purposes


@dataclass(frozen=True, slots=True)
class CodeSecrets:
    """What a code stands for."""

    id: str
    seed: bytes = field(repr=False)  # of an Ed25519 key: the device's proof
    mac_key: bytes = field(repr=False)  # the server's proof


def normalised(code: str) -> str:
    """Normalise a typed code: upper case, no spaces or dashes."""
    return re.sub(r"[\s-]", "", code[:64]).upper()


def code_secrets(code: str) -> CodeSecrets:
    """Derive the secrets of a code. Takes some 0.1 s. Raises ValueError for what cannot be a code."""
    letters = normalised(code)
    if not CODE.fullmatch(letters):
        raise ValueError("an enrolment code looks like K7QF-2M9X-4TBA-9HJC")
    public, secret = letters[:GROUP_LETTERS], letters[GROUP_LETTERS:]
    salt = signed_bytes(CODE_SALT, public.encode())
    derived = hashlib.scrypt(secret.encode(), salt=salt, n=SCRYPT_COST, r=8, p=1, dklen=64)
    return CodeSecrets(public, derived[:32], derived[32:])


@dataclass(frozen=True, slots=True)
class EnrolmentRequest:
    """A device's request. `version`: of the link's protocol."""

    code_id: str
    key: bytes  # the device's public key
    nonce: bytes
    code_signature: bytes
    key_signature: bytes
    version: int = VERSION

    def signed(self, purpose: str) -> bytes:
        """What the code's key (BY_CODE) and the device's (BY_DEVICE) sign."""
        return request_bytes(purpose, self.code_id, self.key, self.nonce)


def request_bytes(purpose: str, code_id: str, key: bytes, nonce: bytes) -> bytes:
    return signed_bytes(purpose, code_id.encode(), key, nonce)


def answer_bytes(request: EnrolmentRequest, device: str, server_key: bytes) -> bytes:
    """What the server's answer authenticates, by MAC and signature: the request, the device's name and its own key."""
    return signed_bytes(BY_SERVER, request.signed(BY_CODE), device.encode(), server_key)


def answer_mac(mac_key: bytes, answer: bytes) -> bytes:
    """The server's proof that it issued the code."""
    return hmac.new(mac_key, answer, hashlib.sha256).digest()


# The handshake of a link: each end proves its key over the nonces of both. Pure; signing is passed in.
#
#     dialler: device, head, or stage before        listener: cloud or stage
#       Hello      name, nonce                ->
#                                             <-    Challenge  name, nonce, signature
#       Proof      introduction, signature    ->
#                                             <-    Welcome    introduction, signature
#
# The listener signs first, so that a dialler tells a stranger nothing but its name. Every signature covers the frames
# before it as they went over the wire, and with them both nonces, the names, the version and both introductions;
# besides, a purpose of its own (`signed_bytes`) and the binding, which both ends know before they talk: the cloud's
# public key, or the certificate that a stage shows in TLS. So nothing that was signed for another handshake, end,
# message or protocol is accepted. A handshake object serves one connection: its nonce must be fresh.
#
# A device has pinned the cloud's key; a head finds a stage's by the name in Challenge; a stage has pinned its head's,
# and is told the key of the stage before. Somebody who passes all frames on unchanged is found out between stages, by
# the binding; between device and cloud he reads and changes what follows: there that is what TLS is for.


UNLIKE = "different vocabularies"
CHALLENGE, PROOF, WELCOME = "listener challenge", "dialler proof", "listener welcome"  # purposes


@dataclass(eq=False, repr=False)
class _End:
    """Common to both ends: the introduction, and what has been signed so far: the binding and the frames, in order."""

    introduction: Introduction | None  # None between processes of one model, which know each other
    _: KW_ONLY
    binding: bytes
    nonce: bytes  # new for each object
    verify: Verify
    device: str = ""  # the dialler's name; a listener hears it in `greeted`
    strategies: tuple[str, ...] = field(default=(), init=False)  # of answers of both, once the handshake is done
    _known: list[str] = field(default_factory=list, init=False)  # that both sides know
    _frames: list[bytes] = field(default_factory=list, init=False)

    @property
    def identifier(self) -> bytes:
        """A name for this connection that both ends compute alike, and no two connections share. Once it is done."""
        return hashlib.sha256(self._signed("connection")).digest()

    def _begin(self, frame: bytes) -> bytes:
        if self._frames:
            raise LocalProtocolError("a handshake serves one connection: its nonce must not be used again")
        return self._add(frame)

    def _add(self, frame: bytes) -> bytes:
        self._frames.append(frame)
        return frame

    def _signed(self, purpose: str, *parts: bytes) -> bytes:
        return signed_bytes(purpose, self.binding, *self._frames, *parts)

    def _meet(self, introduction: bytes, missing: str = "") -> Introduction | None:
        """The peer's introduction. Raises RemoteProtocolError if the sides cannot work together."""
        own = self.introduction
        if own is None:
            return None
        peer = decode_part(introduction, Introduction)
        self._known = [name for name in own.strategies if name in peer.strategies]
        alike = own.tokenizer == peer.tokenizer
        if not self._known:
            missing = missing if alike else f"{own.model_name} and {peer.model_name} have {UNLIKE}"
            raise remote_fault(missing, CloseCode.NO_COMMON_STRATEGY)
        # Where token ids mean different things, the sides search for each other, but write no answer together.
        self.strategies = tuple(self._known) if alike else ()
        return peer


@dataclass(eq=False, repr=False, kw_only=True)
class DiallerHandshake(_End):
    """The end of a device, a head, or the stage before. `keys`: what it holds; `pinned`: None if the name tells it."""

    keys: Sequence[Signer]
    pinned: bytes | None
    server: str = field(default="", init=False)  # the listener's name
    server_key: bytes = field(default=b"", init=False)  # its key, once it is proved

    def __post_init__(self) -> None:
        assert 0 < len(self.keys) <= messages.MAX_KEYS

    def begin(self) -> bytes:
        """The Hello's frame. Once."""
        return self._begin(encode(messages.Hello(VERSION, self.device, self.nonce)))

    def challenged(self, challenge: messages.Challenge, frame: bytes) -> Claim:
        """The listener's claim to its name, to be checked before `prove`. Raises RemoteProtocolError."""
        if challenge.version != VERSION:
            what = f"who dialled speaks {VERSION}, who listens {challenge.version}"
            raise remote_fault(what, CloseCode.VERSION_MISMATCH)
        signed = self._signed(CHALLENGE, challenge.name.encode(), challenge.nonce)
        self._add(frame)
        self.server = challenge.name
        return Claim(self.server, (challenge.signature,), signed, self.verify)

    def prove(self, key: bytes) -> bytes:
        """The Proof's frame, once the claim is proved by this key."""
        self.server_key = key
        introduction = b"" if self.introduction is None else encode_part(self.introduction)
        signed = self._signed(PROOF, introduction)
        return self._add(encode(messages.Proof(introduction, [key.sign(signed) for key in self.keys])))

    def welcomed(self, welcome: messages.Welcome, frame: bytes) -> Introduction | None:
        """The listener's introduction. Raises RemoteProtocolError for a wrong signature or an incompatible cloud."""
        signed = self._signed(WELCOME, welcome.introduction, welcome.key)
        if not self.verify(self.server_key, welcome.signature, signed):
            raise remote_fault("", CloseCode.SERVER_KEY_CHANGED)
        if welcome.key not in {key.public_key for key in self.keys}:
            raise remote_fault("a key that is not this device's")
        self._add(frame)
        return self._meet(welcome.introduction, "the cloud named none of ours")


@dataclass(eq=False, repr=False, kw_only=True)
class ListenerHandshake(_End):
    """The end of a cloud or a stage, which tells `name`. Which keys a dialler has, and whether it may link, is decided
    by who receives the `Claim`."""

    key: Signer
    name: str = ""
    _proof: messages.Proof | None = field(default=None, init=False)

    def greeted(self, hello: messages.Hello, frame: bytes) -> bytes:
        """The Challenge's frame. Once."""
        self.device = hello.device
        self._begin(frame)
        signature = self.key.sign(self._signed(CHALLENGE, self.name.encode(), self.nonce))
        return self._add(encode(messages.Challenge(VERSION, self.name, self.nonce, signature)))

    def proved(self, proof: messages.Proof, frame: bytes) -> Claim:
        """The claim to check."""
        signed = self._signed(PROOF, proof.introduction)
        self._proof = proof
        self._add(frame)
        return Claim(self.device, tuple(proof.signatures), signed, self.verify)

    def admitted(self, key: bytes) -> tuple[bytes, Introduction | None]:
        """The Welcome's frame and the dialler's introduction, once the claim is proved by this key.

        Raises RemoteProtocolError for an incompatible device.
        """
        if self._proof is None:
            raise LocalProtocolError("no device has introduced itself")
        peer, own = self._meet(self._proof.introduction), self.introduction
        introduction = b""
        if own is not None:
            introduction = encode_part(msgspec.structs.replace(own, strategies=self._known))
        signature = self.key.sign(self._signed(WELCOME, introduction, key))
        return self._add(encode(messages.Welcome(introduction, key, signature))), peer


Handshake = DiallerHandshake | ListenerHandshake


# Renewal of a device's key over an open link, at the cloud's request. Pure; sessions go on meanwhile.
#
#     cloud                       device
#       RenewKey            ->
#                                 stores a new key beside the present one
#                           <-    NewKey     signed by both
#       stores the new key in place of the present one
#       KeyKept  signature  ->
#                                 drops the former key
#
# If the link is lost in between, the device holds both keys and proves both in its next handshake; Welcome says which
# one the cloud holds. At no time does the device hold no key that the cloud accepts. Every signature covers the
# connection's identifier (`DiallerHandshake`), so none can be used on another connection.


RENEWAL, POSSESSION, KEPT = "device renewal", "device possession", "cloud renewal"  # purposes
PAUSE_S = 1.0  # a device makes no more than one key in this time, however often it is asked


class DeviceRenewal:
    """The device's end. `present`: the public key that the cloud holds."""

    def __init__(self, handshake: DiallerHandshake, present: bytes) -> None:
        self._handshake = handshake
        self._present = next(key for key in handshake.keys if key.public_key == present)
        self._offered: Signer | None = None
        self._making_until = float("-inf")  # until then no other key is made

    def received(self, message: Message, now: float) -> list[Effect]:
        """A message of the renewal. One that was not asked for is without effect.

        Raises RemoteProtocolError for a wrong signature.
        """
        match message:
            case messages.RenewKey() if now >= self._making_until:
                self._making_until = now + PAUSE_S
                return [MakeKey()]
            case messages.KeyKept(signature=signature) if self._offered is not None:
                signed = self._signed(KEPT, self._offered)
                if not self._handshake.verify(self._handshake.server_key, signature, signed):
                    raise remote_fault("a renewal", CloseCode.SERVER_KEY_CHANGED)
                self._present, self._offered = self._offered, None
                return [SettleKey(self._present.public_key)]
            case _:
                return []

    def offer(self, key: Signer) -> list[Effect]:
        """The new key is stored: send it."""
        self._offered = key
        signature = self._present.sign(self._signed(RENEWAL, key))
        return [Transmit(encode(messages.NewKey(key.public_key, signature, key.sign(self._signed(POSSESSION, key)))))]

    def _signed(self, purpose: str, new: Signer) -> bytes:
        return signed_bytes(purpose, self._handshake.identifier, self._present.public_key, new.public_key)


class CloudRenewal:
    """The cloud's end. `present`: the device's public key."""

    def __init__(self, handshake: ListenerHandshake, present: bytes) -> None:
        self.present = present
        self.awaited = False  # the device has been asked and has not replied
        self._handshake = handshake

    def ask(self) -> list[Effect]:
        """Ask the device for a new key."""
        self.awaited = True
        return [Transmit(encode(messages.RenewKey()))]

    def received(self, message: Message, now: float) -> list[Effect]:  # noqa: ARG002  # as of DeviceRenewal
        """A message of the renewal. One that was not asked for is without effect.

        Raises RemoteProtocolError for a wrong signature.
        """
        if not isinstance(message, messages.NewKey) or not self.awaited:
            return []
        verify, new = self._handshake.verify, message.key
        proved = verify(self.present, message.signature, self._signed(RENEWAL, new))
        if not proved or not verify(new, message.possession, self._signed(POSSESSION, new)):
            raise remote_fault("a renewal", CloseCode.BAD_CREDENTIAL)
        self.awaited = False
        return [KeepKey(self._handshake.device, self.present, new)]

    def kept(self, new: bytes) -> list[Effect]:
        """The new key is stored: tell the device."""
        signature = self._handshake.key.sign(self._signed(KEPT, new))
        self.present = new
        return [Transmit(encode(messages.KeyKept(signature)))]

    def _signed(self, purpose: str, new: bytes) -> bytes:
        return signed_bytes(purpose, self._handshake.identifier, self.present, new)


Renewal = DeviceRenewal | CloudRenewal
