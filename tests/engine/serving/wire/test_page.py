"""Page at /: one file, no resource of another host, colours for light and dark, data by /v1/status only."""

import re

from tests.engine.serving.wire.tinker_calls import calls


def test_the_page_loads_nothing_and_shows_the_status() -> None:
    with calls(token="secret") as own:
        reply = own.client.get("/", headers={"x-api-key": ""})
        status = own.client.get("/v1/status").json()
    text = reply.text
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<(link|img|iframe|script\s+src)|@import|url\(|innerHTML|eval\(", text)
    assert re.findall(r"https?://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text and "fetch(" in text
    for name in re.findall(r"state\.(\w+)", text):
        assert name in status, name
    for part in ("model", "queue"):
        for name in re.findall(rf"state\.{part}\.(\w+)", text):
            assert name in status[part], name
    ids = set(re.findall(r'id="(\w+)"', text))
    assert set(re.findall(r'at\("(\w+)"\)', text)) <= ids
