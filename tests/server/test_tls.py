"""TLS on the ports of a server, and a certificate that is renewed while it runs."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from decode.observed import toy
from perdure import InvalidInputError
from perdure.server.core.server_state import ServerState
from perdure.server.http_server import HttpServer, address, bind
from perdure.server.tls import Certificate
from perdure.system.processes import reload_signals
from server.live_server import PATIENCE, hello, opened, streamed
from server.test_command import serving

pytest.importorskip("cryptography", reason="what makes certificates is not installed")


def issue(folder: Path, name: str, *, key_in: str = "key.pem") -> None:
    """A certificate that signs itself, for 127.0.0.1."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    written = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / key_in).write_bytes(written)
    with (folder / "cert.pem").open("ab" if key_in == "cert.pem" else "wb") as file:
        file.write(built.public_bytes(serialization.Encoding.PEM))


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


def shown_at(url: str) -> str:
    """Who the certificate at an address is for."""
    from cryptography import x509

    host, _, port = url.removeprefix("https://").partition(":")
    pem = ssl.get_server_certificate((host, int(port)), timeout=PATIENCE)
    [name] = x509.load_pem_x509_certificate(pem.encode()).subject
    return str(name.value)


@contextmanager
def served(certificate: Certificate) -> Iterator[str]:
    listening = bind("127.0.0.1", 0)
    listening.listen(8)
    with opened(toy()) as runtime:
        server = HttpServer(ServerState(runtime=runtime, name="toy"), certificate=certificate)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
        thread.start()
        try:
            yield address(listening, tls=True)
        finally:
            server.stop(now=True)
            thread.join(PATIENCE)


@pytest.fixture
def certified(tmp_path: Path) -> Path:
    issue(tmp_path, "first")
    return tmp_path


def test_the_command_speaks_tls_on_its_port_and_none_on_its_socket(
    zoo_path: Callable[[str], Path], certified: Path
) -> None:
    local = certified / "socket"
    options = ("--tls-cert", str(certified / "cert.pem"), "--tls-key", str(certified / "key.pem"))
    with serving(zoo_path("llama"), *options, "--socket", str(local)) as running:
        assert running.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=running.url, verify=trusting(certified), timeout=PATIENCE) as client:
            assert client.get("/health").status_code == 200
            assert streamed(client, "/v1/chat/completions", hello())
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{running.url}/health", verify=True, trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{running.url.replace('https', 'http')}/health", timeout=5, trust_env=False)
        transport = httpx.HTTPTransport(uds=str(local))
        with httpx.Client(base_url="http://here", transport=transport, timeout=PATIENCE) as client:
            assert client.get("/health").status_code == 200
        if reload_signals():
            issue(certified, "second")
            running.process.send_signal(reload_signals()[0])
            end = time.monotonic() + PATIENCE
            while shown_at(running.url) != "second" and time.monotonic() < end:
                time.sleep(0.05)
            assert shown_at(running.url) == "second"


def test_a_renewed_certificate_is_shown_and_a_wrong_one_is_not(certified: Path) -> None:
    certificate = Certificate(certified / "cert.pem", certified / "key.pem")
    with served(certificate) as url:
        assert shown_at(url) == "first"
        # Half of the new pair: as if both were being replaced.
        key = (certified / "key.pem").read_bytes()
        issue(certified, "second")
        new = (certified / "key.pem").read_bytes()
        (certified / "key.pem").write_bytes(key)
        certificate.renew()
        assert shown_at(url) == "first"
        (certified / "key.pem").write_bytes(new)
        certificate.renew()
        assert shown_at(url) == "second"
        (certified / "cert.pem").unlink()
        certificate.renew()
        assert shown_at(url) == "second"


@pytest.mark.parametrize("broken", ["cert.pem", "key.pem"])
def test_what_is_no_certificate_is_refused_before_anything_is_loaded(broken: str, certified: Path) -> None:
    (certified / broken).write_text("nothing")
    with pytest.raises(InvalidInputError, match="no certificate with its key"):
        Certificate(certified / "cert.pem", certified / "key.pem")


def test_key_and_certificate_may_be_one_file(tmp_path: Path) -> None:
    issue(tmp_path, "one", key_in="cert.pem")
    Certificate(tmp_path / "cert.pem", None)
