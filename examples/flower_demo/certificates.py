"""Keys for a federation on one machine: a certificate authority, the SuperLink's certificate, and SuperNode keys."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM, SSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
NO_PASSWORD = serialization.NoEncryption()
DAYS = 30


def make_certificates(folder: Path) -> None:
    """Write `ca.crt`, `server.pem` and `server.key`, valid only for 127.0.0.1."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    root = _certificate("fedcams demo", authority, "fedcams demo", authority, is_authority=True)
    own = _certificate("127.0.0.1", server, "fedcams demo", authority, is_authority=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(root.public_bytes(PEM))
    (folder / "server.pem").write_bytes(own.public_bytes(PEM))
    secret(folder / "server.key", server.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NO_PASSWORD))


def make_node_key(path: Path) -> Path:
    """Write a SuperNode's private key, and its public key next to it with the ending `.pub`."""
    key = ec.generate_private_key(ec.SECP384R1())
    secret(path, key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, NO_PASSWORD))
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(SSH, serialization.PublicFormat.OpenSSH))
    return path


def secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_bytes(data)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey, is_authority: bool
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    loopback = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if not is_authority:
        builder = builder.add_extension(loopback, critical=False)
    return builder.sign(signer, hashes.SHA384())
