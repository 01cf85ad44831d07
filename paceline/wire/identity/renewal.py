"""Renewal of a device's key over an open link, at the cloud's request. Pure; sessions go on meanwhile.

    cloud                       device
      RenewKey            ->
                                stores a new key beside the present one
                          <-    NewKey     signed by both
      stores the new key in place of the present one
      KeyKept  signature  ->
                                drops the former key

If the link is lost in between, the device holds both keys and proves both in its next handshake; Welcome says which
one the cloud holds. At no time does the device hold no key that the cloud accepts. Every signature covers the
connection's identifier (`wire.identity.handshake`), so none can be used on another connection.
"""

from __future__ import annotations

from paceline.errors import RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import encode
from paceline.wire.effects import Effect, KeepKey, MakeKey, SettleKey, Transmit
from paceline.wire.identity.handshake import CloudHandshake, DeviceHandshake
from paceline.wire.identity_messages import KeyKept, NewKey, RenewKey
from paceline.wire.messages import Message
from paceline.wire.signing import Signer, signed_bytes

RENEWAL, POSSESSION, KEPT = "device renewal", "device possession", "cloud renewal"  # purposes
PAUSE_S = 1.0  # a device makes no more than one key in this time, however often it is asked


class DeviceRenewal:
    """The device's end. `present`: the public key that the cloud holds."""

    def __init__(self, handshake: DeviceHandshake, present: bytes) -> None:
        self._handshake = handshake
        self._present = next(key for key in handshake.keys if key.public_key == present)
        self._offered: Signer | None = None
        self._making_until = float("-inf")  # until then no other key is made

    def received(self, message: Message, now: float) -> list[Effect]:
        """A message of the renewal. One that was not asked for is without effect.

        Raises RemoteProtocolError for a wrong signature.
        """
        match message:
            case RenewKey() if now >= self._making_until:
                self._making_until = now + PAUSE_S
                return [MakeKey()]
            case KeyKept(signature=signature) if self._offered is not None:
                signed = self._signed(KEPT, self._offered)
                if not self._handshake.verify(self._handshake.server_key, signature, signed):
                    raise RemoteProtocolError("a renewal", close_code=CloseCode.SERVER_KEY_CHANGED)
                self._present, self._offered = self._offered, None
                return [SettleKey(self._present.public_key)]
            case _:
                return []

    def offer(self, key: Signer) -> list[Effect]:
        """The new key is stored: send it."""
        self._offered = key
        signature = self._present.sign(self._signed(RENEWAL, key))
        return [Transmit(encode(NewKey(key.public_key, signature, key.sign(self._signed(POSSESSION, key)))))]

    def _signed(self, purpose: str, new: Signer) -> bytes:
        return signed_bytes(purpose, self._handshake.identifier, self._present.public_key, new.public_key)


class CloudRenewal:
    """The cloud's end. `present`: the device's public key."""

    def __init__(self, handshake: CloudHandshake, present: bytes) -> None:
        self.present = present
        self.awaited = False  # the device has been asked and has not replied
        self._handshake = handshake

    def ask(self) -> list[Effect]:
        """Ask the device for a new key."""
        self.awaited = True
        return [Transmit(encode(RenewKey()))]

    def received(self, message: Message, now: float) -> list[Effect]:  # noqa: ARG002  # as of DeviceRenewal
        """A message of the renewal. One that was not asked for is without effect.

        Raises RemoteProtocolError for a wrong signature.
        """
        if not isinstance(message, NewKey) or not self.awaited:
            return []
        verify, new = self._handshake.verify, message.key
        proved = verify(self.present, message.signature, self._signed(RENEWAL, new))
        if not proved or not verify(new, message.possession, self._signed(POSSESSION, new)):
            raise RemoteProtocolError("a renewal", close_code=CloseCode.BAD_CREDENTIAL)
        self.awaited = False
        return [KeepKey(self._handshake.device, self.present, new)]

    def kept(self, new: bytes) -> list[Effect]:
        """The new key is stored: tell the device."""
        signature = self._handshake.key.sign(self._signed(KEPT, new))
        self.present = new
        return [Transmit(encode(KeyKept(signature)))]

    def _signed(self, purpose: str, new: bytes) -> bytes:
        return signed_bytes(purpose, self._handshake.identifier, self.present, new)


Renewal = DeviceRenewal | CloudRenewal


def renewal_of(handshake: DeviceHandshake | CloudHandshake, present: bytes) -> Renewal:
    """The renewal of one end, once the handshake is done."""
    if isinstance(handshake, DeviceHandshake):
        return DeviceRenewal(handshake, present)
    return CloudRenewal(handshake, present)
