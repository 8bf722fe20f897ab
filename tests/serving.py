"""Real servers on this machine: files with ranges, a package index with one wheel, a model hub."""

from __future__ import annotations

import base64
import datetime
import hashlib
import http.client
import io
import ipaddress
import json
import re
import select
import socket
import ssl
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(kw_only=True)
class Page:
    """What the server has at one path, and how it misbehaves there."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    drops: list[int] = field(default_factory=list)
    """Bytes after which the first GETs lose their connection, one entry for each GET."""
    hold: threading.Event | None = None
    """Once half of the body is sent, wait for this."""


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None


class Site:
    """A web site of a few pages. `requests` is all that was asked of it, in order."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.pages: dict[str, Page] = {}
        self.requests: list[Request] = []
        self.asked = threading.Condition()

    def gets(self, path: str) -> list[Request]:
        return [it for it in self.requests if it.method == "GET" and it.path == path]


@contextmanager
def site(certificate: ssl.SSLContext | None = None) -> Iterator[Site]:
    """A site that is up while the block runs; by HTTPS, with that certificate."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked = self.headers.get("Range")
            with here.asked:
                here.requests.append(
                    Request(
                        method=self.command,
                        path=path,
                        range=asked,
                        authorization=self.headers.get("Authorization"),
                    )
                )
                here.asked.notify_all()
            page = here.pages.get(path, Page(status=404, body=b"not here"))
            body, status, headers = page.body, page.status, dict(page.headers)
            unchanged = self.headers.get("If-Range") in (None, headers.get("ETag"))
            match = re.fullmatch(r"bytes=(\d+)-", asked or "")
            if match and page.ranges and unchanged and status == 200:
                first = int(match[1])
                if first >= len(page.body):
                    status, body = 416, b""
                    headers["Content-Range"] = f"bytes */{len(page.body)}"
                else:
                    status, body = 206, page.body[first:]
                    headers["Content-Range"] = f"bytes {first}-{len(page.body) - 1}/{len(page.body)}"
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                self._send(page, body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def _send(self, page: Page, body: bytes) -> None:
            if page.drops:
                self.wfile.write(body[: page.drops.pop(0)])
                self.close_connection = True
                return
            half = len(body) // 2 if page.hold else 0
            self.wfile.write(body[:half])
            if page.hold:
                self.wfile.flush()
                page.hold.wait(60)
            self.wfile.write(body[half:])

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients that go away are what the tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    here = Site(server)
    if certificate is not None:
        server.socket = certificate.wrap_socket(server.socket, server_side=True)
        here.url = here.url.replace("http://", "https://")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield here
    finally:
        for page in here.pages.values():
            if page.hold:
                page.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def proxy() -> Iterator[Site]:
    """A forwarding proxy: its `requests` are the addresses that it was asked for, `host:port` for tunnels."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def _note(self) -> None:
            login = self.headers.get("Proxy-Authorization")
            here.requests.append(
                Request(method=self.command, path=self.path, range=None, authorization=login)
            )

        def do_GET(self) -> None:
            self._note()
            parts = urlsplit(self.path)
            connection = http.client.HTTPConnection(parts.netloc)
            connection.request("GET", f"{parts.path}?{parts.query}", headers=dict(self.headers))
            answer = connection.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            connection.close()

        def do_CONNECT(self) -> None:
            self._note()
            host, _, port = self.path.rpartition(":")
            self.close_connection = True
            with socket.create_connection((host, int(port))) as there:
                self.send_response(200)
                self.end_headers()
                ends = {self.connection: there, there: self.connection}
                while True:
                    for end in select.select(list(ends), [], [])[0]:
                        if not (data := end.recv(1 << 16)):
                            return
                        ends[end].sendall(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    here = Site(server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield here
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def own_authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A company's certificate authority as a file, and the context of a local server that it signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)

    def signed(name: str, public: ec.EllipticCurvePublicKey, *, is_authority: bool) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "A Company")]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )

    authority = folder / "company.pem"
    authority.write_bytes(signed("A Company", key.public_key(), is_authority=True).public_bytes(Encoding.PEM))
    own = ec.generate_private_key(ec.SECP256R1())
    pair = folder / "server.pem"
    pair.write_bytes(
        own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + signed("127.0.0.1", own.public_key(), is_authority=False).public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    return authority, context


def wheel(package: str, version: str, files: Mapping[str, bytes]) -> bytes:
    """A wheel that pip accepts, with these files in it."""
    info = f"{package.replace('-', '_')}-{version}.dist-info"
    everything = {
        **files,
        f"{info}/METADATA": metadata(package, version),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in everything.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if "/bin/" in name else 0o100644) << 16
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(data)}\n"
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return buffer.getvalue()


def metadata(package: str, version: str) -> bytes:
    return f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()


def put_wheel(here: Site, package: str, version: str, data: bytes, prefix: str = "") -> str:
    """Put a wheel on the site's package index; give its path. pip's own look at it needs no download."""
    name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    path = f"{prefix}/files/{name}"
    about = metadata(package, version)
    here.pages[f"{prefix}/simple/{package}/"] = Page(
        body=(
            f'<!DOCTYPE html><a href="{path}#sha256={hashlib.sha256(data).hexdigest()}" '
            f'data-core-metadata="sha256={hashlib.sha256(about).hexdigest()}">{name}</a>'
        ).encode(),
        headers={"Content-Type": "text/html"},
    )
    here.pages[f"{path}.metadata"] = Page(body=about)
    here.pages[path] = Page(body=data, headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})
    return path


def npm_archive(files: Mapping[str, bytes]) -> bytes:
    """The archive of an npm package with these files in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def put_npm(here: Site, name: str, version: str, data: bytes, prefix: str = "", public: str = "") -> str:
    """Put a package on the site's npm registry; give the path of its archive. A mirror may list it as at
    the `public` registry."""
    path = f"{prefix}/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"
    integrity = f"sha512-{base64.b64encode(hashlib.sha512(data).digest()).decode()}"
    about = {
        "name": name,
        "version": version,
        "dist": {
            "tarball": f"{public or here.url + prefix}{path.removeprefix(prefix)}",
            "integrity": integrity,
        },
    }
    listing = {"name": name, "dist-tags": {"latest": version}, "versions": {version: about}}
    here.pages[f"{prefix}/{name}"] = Page(
        body=json.dumps(listing).encode(), headers={"Content-Type": "application/json"}
    )
    here.pages[path] = Page(body=data, headers={"Content-Type": "application/octet-stream"})
    return path


def put_repo(here: Site, repo: str, files: Mapping[str, bytes], revision: str = "main") -> None:
    """Put a repo on the site's model hub."""
    commit = hashlib.sha1(repo.encode()).hexdigest()
    listing = {
        "_id": commit,
        "id": repo,
        "modelId": repo,
        "sha": commit,
        "siblings": [{"rfilename": name} for name in files],
    }
    page = Page(body=json.dumps(listing).encode(), headers={"Content-Type": "application/json"})
    here.pages[f"/api/models/{repo}"] = page
    here.pages[f"/api/models/{repo}/revision/{revision}"] = page
    for name, data in files.items():
        here.pages[f"/{repo}/resolve/{revision}/{name}"] = Page(
            body=data,
            headers={
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": commit,
                "Accept-Ranges": "bytes",
            },
        )


def refusal(status: int, code: str) -> Page:
    """How a hub says no."""
    return Page(status=status, headers={"X-Error-Code": code, "X-Error-Message": f"refused: {code}"})
