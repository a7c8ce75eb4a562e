"""The certificate that workers and servers of a run share: a self-signed EC key, in one file."""

import datetime
from pathlib import Path

from planner.errors import RequestError
from runtime.servers.private_files import make_folder, write_new
from runtime.servers.transport import CERTIFICATE

_YEARS = 10


def make_certificate(folder: Path) -> Path:
    """Write the key and the certificate to FOLDER/certificate.pem, for its owner alone. Raises RequestError where the
    file exists, or the package that makes certificates is missing."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise RequestError(
            "a certificate is made by the package cryptography, which is missing: pip install"
            f" 'parallel-planner[servers]'; or put key and certificate of yours into {folder / CERTIFICATE}"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "parameter servers")])
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)  # clocks of hosts differ
        .not_valid_after(now + _YEARS * 365 * day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return _written(folder, secret + made.public_bytes(serialization.Encoding.PEM))


def _written(folder: Path, content: bytes) -> Path:
    make_folder(folder)
    path = folder / CERTIFICATE
    try:
        write_new(path, content)
    except FileExistsError:
        raise RequestError(f"{path} is there already; delete it on all hosts to make another one") from None
    return path
