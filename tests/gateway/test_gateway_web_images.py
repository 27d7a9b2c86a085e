"""Pictures from the web: off by default; then https only, and only from the address that was checked."""

import http.server
import io
import ssl
import threading
import time

import pytest
import trustme
from PIL import Image

from ple_gateway.images.web import WebImages, is_public_address

HOST = "pictures.example"


def picture(colour):
    output = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(output, "PNG")
    return output.getvalue()


class PictureServer(http.server.ThreadingHTTPServer):
    """Serves pictures over TLS on loopback, for certificates of one name."""

    daemon_threads = False

    def __init__(self) -> None:
        authority = trustme.CA()
        self.client_tls = ssl.create_default_context()
        authority.configure_trust(self.client_tls)
        server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(HOST).configure_cert(server_tls)
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_tls = server_tls
        self.hosts: list[str] = []
        self.released = threading.Event()

    def finish_request(self, request, client_address):
        request.settimeout(10)
        with self.server_tls.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)

    def handle_error(self, request, client_address):
        pass  # clients here break connections on purpose


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PictureServer

    def do_GET(self):
        self.server.hosts.append(self.headers["host"])
        getattr(self, self.path.strip("/").partition("?")[0])()

    def _send(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def good(self):
        self._send(200, picture((10, 200, 30)))

    def moved(self):
        self._send(302, b"", location="https://pictures.example/good")

    def missing(self):
        self._send(404, b"nothing at 10.1.2.3")

    def large(self):
        self._send(200, b"x" * 400_000)

    def packed(self):
        self._send(200, picture((1, 1, 1)), content_encoding="gzip")

    def page(self):
        self._send(200, b"<html>no picture</html>")

    def slow(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        self.server.released.wait(10)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def pictures():
    server = PictureServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join(10)
    server.server_close()


class Names:
    """A resolver that answers from a script, and counts."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host, port):
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


def loopback_or_public(address):
    """The real rule, but for the one address on which the test's server can listen."""
    return address == "127.0.0.1" or is_public_address(address)


@pytest.fixture
def web(start_gateway, pictures):
    def start(names, **settings):
        gateway = start_gateway(image_urls="https", **settings)
        gateway.gateway.images.web = WebImages(
            gateway.gateway.settings.image_url_max_bytes,
            gateway.gateway.settings.image_url_timeout_s,
            resolve=names,
            is_public=loopback_or_public,
            tls=pictures.client_tls,
        )
        return gateway

    return start


def part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def turn(url):
    return {"role": "user", "content": [part(url), {"type": "text", "text": "what is it?"}]}


def url_of(server, path, host=HOST):
    return f"https://{host}:{server.server_port}/{path}"


def check_refused(answered, *words):
    assert (answered.status, answered.error["code"]) == (400, "invalid_image")
    assert answered.error["param"] == "messages[0].content[0]"
    assert all(word in answered.error["message"] for word in words), answered.error
    for secret in ("127.0.0.1", "10.1.2.3", "169.254", HOST, "pictures"):
        assert secret not in answered.body.decode()


def sent_url(engine):
    return engine.calls[-1].request["messages"][0]["content"][0]["image_url"]["url"]


def test_g14_web_pictures_are_off_by_default(gateway, engine):
    for url in ("https://pictures.example/good", "http://pictures.example/good", "ftp://x/y"):
        check_refused(gateway.chat(messages=[turn(url)]), "data URL")
    assert not engine.calls


def test_g14_a_picture_is_fetched_from_the_checked_address(web, pictures, engine):
    names = Names(["127.0.0.1"], ["169.254.169.254"])  # the second answer is the rebinding
    gateway = web(names)
    pictures.hosts.clear()
    assert gateway.chat(messages=[turn(url_of(pictures, "good"))]).status == 200
    assert names.asked == [HOST]
    assert pictures.hosts == [f"{HOST}:{pictures.server_port}"]
    as_data = gateway.chat(messages=[turn(sent_url(engine))])
    assert as_data.status == 200
    assert engine.calls[0].body == engine.calls[1].body  # the same picture by any way gives the same bytes
    check_refused(gateway.chat(messages=[turn(url_of(pictures, "good"))]), "public")
    assert len(pictures.hosts) == 1


def test_g14_in_history_a_fetched_picture_stays_what_it_was(web, pictures, engine):
    gateway = web(Names(["127.0.0.1"], ["10.0.0.1"]))
    assert gateway.chat(messages=[turn(url_of(pictures, "good"))]).status == 200
    first = sent_url(engine)
    later = [
        turn(url_of(pictures, "good")),
        {"role": "assistant", "content": "green"},
        {"role": "user", "content": "?"},
    ]
    assert gateway.chat(messages=later).status == 200
    assert sent_url(engine) == first
    later[0] = turn(url_of(pictures, "good?never-seen"))
    assert gateway.chat(messages=later).status == 200
    assert "left out" in engine.calls[-1].request["messages"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("moved", "redirects"),
        ("missing", "404"),
        ("large", "larger"),
        ("packed", "compresses"),
        ("page", "no JPEG"),
    ],
)
def test_g14_what_is_no_plain_picture_is_refused(web, pictures, engine, path, word):
    gateway = web(Names(["127.0.0.1"]), image_url_max_bytes=300_000)
    pictures.hosts.clear()
    check_refused(gateway.chat(messages=[turn(url_of(pictures, path))]), word)
    assert len(pictures.hosts) == 1  # no redirect is followed
    assert not engine.calls


def test_g14_slow_servers_and_other_names_are_refused(web, pictures, engine):
    gateway = web(Names(["127.0.0.1"]), image_url_timeout_s=0.3)
    began_s = time.monotonic()
    check_refused(gateway.chat(messages=[turn(url_of(pictures, "slow"))]), "in time")
    assert time.monotonic() - began_s < 3
    check_refused(gateway.chat(messages=[turn(url_of(pictures, "good", host="other.example"))]), "fetched")
    check_refused(gateway.chat(messages=[turn(f"https://{HOST}:1/good")]), "fetched")


@pytest.mark.parametrize(
    "addresses",
    [
        ["169.254.169.254"],
        ["127.0.0.1", "10.0.0.8"],
        ["::1"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a9fe:a9fe"],
        [],
    ],
)
def test_g14_a_name_with_any_private_address_is_refused(web, engine, addresses):
    check_refused(web(Names(addresses)).chat(messages=[turn(f"https://{HOST}/good")]), "public")
    assert not engine.calls


@pytest.mark.parametrize(
    "url",
    [
        f"http://{HOST}/good",
        f"https://user:secret@{HOST}/good",
        "https:///good",
        "https://",
        f"https://{HOST}:99999/good",
        "https://[::1/good",
        f"https://{HOST}/" + "x" * 9000,
    ],
)
def test_g14_other_urls_are_refused(web, engine, url):
    check_refused(web(Names(["127.0.0.1"])).chat(messages=[turn(url)]))
    assert not engine.calls


def test_g14_literal_addresses_are_judged_too(start_gateway, engine):
    gateway = start_gateway(image_urls="https")
    for host in (
        "127.0.0.1",
        "[::1]",
        "169.254.169.254",
        "[::ffff:127.0.0.1]",
        "0x7f.1",
        "2130706433",
        "localhost",
    ):
        answered = gateway.chat(messages=[turn(f"https://{host}/good")])
        assert (answered.status, answered.error["code"]) == (400, "invalid_image")
        assert host.strip("[]") not in answered.error["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),
        ("2002:5db8:d822::1", True),
        ("10.0.0.1", False),
        ("172.31.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("192.0.2.1", False),
        ("::", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("2001:db8::1", False),
        ("2001:0:5db8:d822::1", False),
        ("2002:a00:1::1", False),
        ("::ffff:192.168.0.1", False),
        ("nonsense", False),
    ],
)
def test_g14_public_addresses(address, public):
    assert is_public_address(address) is public
