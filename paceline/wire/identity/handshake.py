"""The handshake of a link: each end proves its key over the nonces of both. Pure; signing is passed in.

    device                                        cloud
      Hello      name, nonce             ->
                                         <-       Challenge  nonce, signature
      Proof      introduction, signature ->
                                         <-       Welcome    introduction, signature

The cloud signs first, so that a device tells a stranger nothing but its name. Every signature covers the frames before
it as they went over the wire, and with them both nonces, the device's name, the version and both tokenizers; besides,
the cloud's public key and a purpose of its own (`signing`). So nothing that was signed for another handshake, end,
message or protocol is accepted. A handshake object serves one connection: its nonce must be fresh.

Not handled: somebody who passes all frames on unchanged reads and changes what follows; that is what TLS is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import decode_introduction, encode, encode_introduction
from paceline.wire.identity_messages import MAX_KEYS, Challenge, Hello, Introduction, Proof, Welcome
from paceline.wire.messages import VERSION
from paceline.wire.signing import Claim, Signer, Verify, signed_bytes

CHALLENGE, PROOF, WELCOME = "cloud challenge", "device proof", "cloud welcome"  # purposes


class DeviceHandshake:
    """The device's end. `keys`: what it holds; `server_key`: pinned when it enrolled; `nonce`: new for each object."""

    def __init__(
        self,
        introduction: Introduction,
        *,
        device: str,
        keys: Sequence[Signer],
        server_key: bytes,
        nonce: bytes,
        verify: Verify,
    ) -> None:
        assert 0 < len(keys) <= MAX_KEYS
        self.device = device
        self.keys = tuple(keys)
        self.server_key = server_key
        self.verify = verify
        self.strategies: tuple[str, ...] = ()  # of both sides, once welcomed
        self._introduction = introduction
        self._nonce = nonce
        self._transcript = _Transcript(server_key)

    def begin(self) -> bytes:
        """The Hello's frame. Once."""
        return self._transcript.begin(encode(Hello(VERSION, self.device, self._nonce)))

    def challenged(self, challenge: Challenge, frame: bytes) -> bytes:
        """The Proof's frame. Raises RemoteProtocolError for a cloud that did not prove the pinned key."""
        if challenge.version != VERSION:
            what = f"device speaks {VERSION}, cloud {challenge.version}"
            raise RemoteProtocolError(what, close_code=CloseCode.VERSION_MISMATCH)
        self._check(challenge.signature, self._transcript.signed(CHALLENGE, challenge.nonce))
        self._transcript.add(frame)
        introduction = encode_introduction(self._introduction)
        signed = self._transcript.signed(PROOF, introduction)
        return self._transcript.add(encode(Proof(introduction, [key.sign(signed) for key in self.keys])))

    def welcomed(self, welcome: Welcome, frame: bytes) -> Introduction:
        """The cloud's introduction. Raises RemoteProtocolError for a wrong signature or an incompatible cloud."""
        self._check(welcome.signature, self._transcript.signed(WELCOME, welcome.introduction, welcome.key))
        if welcome.key not in {key.public_key for key in self.keys}:
            raise RemoteProtocolError("a key that is not this device's", close_code=CloseCode.BAD_FRAME)
        self._transcript.add(frame)
        peer = decode_introduction(welcome.introduction)
        own = self._introduction
        if peer.tokenizer != own.tokenizer:
            what = f"{own.model_name} and {peer.model_name}"
            raise RemoteProtocolError(what, close_code=CloseCode.TOKENIZER_MISMATCH)
        self.strategies = tuple(name for name in own.strategies if name in peer.strategies)
        if not self.strategies:
            raise RemoteProtocolError("the cloud named none of ours", close_code=CloseCode.NO_COMMON_STRATEGY)
        return peer

    @property
    def identifier(self) -> bytes:
        """A name for this connection that both ends compute alike, and no two connections share. Once welcomed."""
        return self._transcript.digest()

    def _check(self, signature: bytes, signed: bytes) -> None:
        if not self.verify(self.server_key, signature, signed):
            raise RemoteProtocolError("", close_code=CloseCode.SERVER_KEY_CHANGED)


class CloudHandshake:
    """The cloud's end. `nonce`: new for each object. Which keys a device has, and whether it may link, is decided by
    who receives the `Claim`."""

    def __init__(self, introduction: Introduction, *, key: Signer, nonce: bytes, verify: Verify) -> None:
        self.key = key
        self.verify = verify
        self.device = ""  # its name, claimed from `greeted` on
        self.strategies: tuple[str, ...] = ()  # of both sides, once admitted
        self._introduction = introduction
        self._nonce = nonce
        self._peer: Introduction | None = None
        self._transcript = _Transcript(key.public_key)

    def greeted(self, hello: Hello, frame: bytes) -> bytes:
        """The Challenge's frame. Once."""
        self.device = hello.device
        self._transcript.begin(frame)
        signature = self.key.sign(self._transcript.signed(CHALLENGE, self._nonce))
        return self._transcript.add(encode(Challenge(VERSION, self._nonce, signature)))

    def proved(self, proof: Proof, frame: bytes) -> Claim:
        """The claim to check. Raises RemoteProtocolError for an introduction that cannot be read."""
        self._peer = decode_introduction(proof.introduction)
        signed = self._transcript.signed(PROOF, proof.introduction)
        self._transcript.add(frame)
        return Claim(self.device, tuple(proof.signatures), signed, self.verify)

    def admitted(self, key: bytes) -> tuple[bytes, Introduction]:
        """The Welcome's frame and the device's introduction, once the claim is proved by this key.

        Raises RemoteProtocolError for an incompatible device.
        """
        if self._peer is None:
            raise LocalProtocolError("no device has introduced itself")
        peer, own = self._peer, self._introduction
        if peer.tokenizer != own.tokenizer:
            what = f"{peer.model_name} and {own.model_name}"
            raise RemoteProtocolError(what, close_code=CloseCode.TOKENIZER_MISMATCH)
        self.strategies = tuple(name for name in own.strategies if name in peer.strategies)
        if not self.strategies:
            raise RemoteProtocolError("", close_code=CloseCode.NO_COMMON_STRATEGY)
        introduction = encode_introduction(msgspec.structs.replace(own, strategies=list(self.strategies)))
        signature = self.key.sign(self._transcript.signed(WELCOME, introduction, key))
        return self._transcript.add(encode(Welcome(introduction, key, signature))), peer

    @property
    def identifier(self) -> bytes:
        """As of DeviceHandshake, once admitted."""
        return self._transcript.digest()


class _Transcript:
    """The cloud's public key and the frames so far, in order."""

    def __init__(self, server_key: bytes) -> None:
        self._parts = [server_key]

    def begin(self, frame: bytes) -> bytes:
        if len(self._parts) > 1:
            raise LocalProtocolError("a handshake serves one connection: its nonce must not be used again")
        return self.add(frame)

    def add(self, frame: bytes) -> bytes:
        self._parts.append(frame)
        return frame

    def signed(self, purpose: str, *parts: bytes) -> bytes:
        return signed_bytes(purpose, *self._parts, *parts)

    def digest(self) -> bytes:
        return hashlib.sha256(self.signed("connection")).digest()


Handshake = DeviceHandshake | CloudHandshake
