#!/usr/bin/env python3
"""page_test.py: the page of `esmm report` in a real browser, headless Chromium, over its debugging protocol.

    python3 tests/browser/page_test.py CHROMIUM PAGE HOSTILE DIRECTORY

PAGE has two records to compare, HOSTILE text that would run or break the page if it were taken for more than text.
DIRECTORY is for the browser's profile and for pictures. Prints TAP lines. Nothing but Python's standard library.
"""
import base64
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time


class Browser:
    """One tab. Everything that the page logs, throws or asks the network for is kept in `events`."""

    def __init__(self, program, directory):
        os.makedirs(directory, exist_ok=True)
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--remote-debugging-port=0", "--user-data-dir=" + directory, "about:blank"],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        address = None
        for line in self.process.stderr:
            found = re.search(rb"DevTools listening on ws://127.0.0.1:(\d+)(/\S+)", line)
            if found:
                address = int(found.group(1)), found.group(2).decode()
                break
        if address is None:
            raise RuntimeError("the browser did not start")
        self.socket = socket.create_connection(("127.0.0.1", address[0]), 60)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(f"GET {address[1]} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.bytes = b""
        while b"\r\n\r\n" not in self.bytes:
            self.bytes += self.socket.recv(4096)
        self.bytes = self.bytes.split(b"\r\n\r\n", 1)[1]
        self.count, self.session, self.events = 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def take(self, count):
        while len(self.bytes) < count:
            more = self.socket.recv(1 << 16)
            if not more:
                raise RuntimeError("the browser went away")
            self.bytes += more
        out, self.bytes = self.bytes[:count], self.bytes[count:]
        return out

    def receive(self):
        text = b""
        while True:
            first, length = self.take(2)
            length &= 127
            if length == 126:
                length = struct.unpack(">H", self.take(2))[0]
            elif length == 127:
                length = struct.unpack(">Q", self.take(8))[0]
            text += self.take(length)
            if first & 128:
                return json.loads(text)

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data, mask = json.dumps(message).encode(), os.urandom(4)
        head = struct.pack(">BB", 0x81, 128 | len(data)) if len(data) < 126 else struct.pack(">BBH", 0x81, 254, len(data))
        self.socket.sendall(head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:400])
        return answer["result"].get("value")

    def open(self, path, width, height=800):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.events = []
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        for _ in range(300):
            if self.run("document.readyState") == "complete" and self.run("location.protocol") == "file:":
                return
            time.sleep(0.1)
        raise RuntimeError("the page did not load")

    def errors(self):
        self.run("1")  # what came before it has arrived
        out = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown" or (method == "Log.entryAdded" and params["entry"]["level"] == "error"):
                out.append(json.dumps(params)[:300])
            if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "log"):
                out.append(json.dumps(params)[:300])
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                out.append("asks the network for " + params["request"]["url"][:200])
        return out

    def point_at(self, selector):
        place = self.run(f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
                         f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({selector!r}))")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      text="\r" if key == "Enter" and kind == "keyDown" else "")

    def picture(self, path):
        with open(path, "wb") as out:
            out.write(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait(20)


failures = 0


def check(name, good, why=""):
    global failures
    print(("ok - " if good else "not ok - ") + name, flush=True)
    if not good:
        failures += 1
        print("# " + str(why)[:1500].replace("\n", "\n# "))


COLUMN = "[...document.querySelectorAll('#lines tbody tr')].map(r => r.cells[%d].textContent)"
SPEED = COLUMN % 13

# Own checks of accessibility: what a reader of the page without sight or a mouse would miss. Returns what is wrong.
ACCESS = r"""
(() => {
  const wrong = [], name = e => (e.labels && [...e.labels].map(l => l.textContent).join('')) || e.getAttribute('aria-label') || e.textContent;
  if (document.documentElement.lang !== 'en') wrong.push('no language');
  if (!document.title) wrong.push('no title');
  if (document.querySelectorAll('h1').length !== 1 || !document.querySelector('main')) wrong.push('no main heading or part');
  for (const e of document.querySelectorAll('select, input, button, [role=region], [role=img], [role=group]'))
    if (!name(e).trim()) wrong.push('no name: ' + e.outerHTML.slice(0, 80));
  for (const e of document.querySelectorAll('select, input'))
    if (!e.labels.length) wrong.push('no label: ' + e.outerHTML.slice(0, 80));
  for (const e of document.querySelectorAll('th')) if (e.scope !== 'col' || !e.hasAttribute('aria-sort')) wrong.push('a heading without scope or order');
  for (const e of document.querySelectorAll('table')) if (!e.hidden && e.rows.length && !e.caption) wrong.push('a table without a caption');
  const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
  if (new Set(ids).size !== ids.length) wrong.push('an id twice');
  for (const e of document.querySelectorAll('[aria-labelledby]')) if (!document.getElementById(e.getAttribute('aria-labelledby'))) wrong.push('labelled by nothing');
  const level = [...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1]);
  level.forEach((l, i) => { if (i && l > level[i - 1] + 1) wrong.push('a level of headings is left out'); });
  const light = c => { const [r, g, b] = c.match(/[\d.]+/g).map(x => x / 255).map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\)$/.test(c)) return c; } return 'rgb(255,255,255)'; };
  const seen = new Set();
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || ['SCRIPT', 'OPTION'].includes(e.tagName)) continue;
    const svg = e.namespaceURI.includes('svg'), front = svg ? getComputedStyle(e).fill : getComputedStyle(e).color, back = ground(e);
    if (seen.has(front + back)) continue;
    seen.add(front + back);
    const a = light(front), b = light(back), contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(2)}: ${e.outerHTML.slice(0, 80)}`);
  }
  return wrong;
})()
"""


def main():
    program, page, hostile, directory = sys.argv[1:5]
    browser = Browser(program, os.path.join(directory, "profile"))
    try:
        browser.open(page, 1200)
        errors = browser.errors()
        check("the page loads without errors and without the network", not errors, errors)
        total = browser.run("document.querySelectorAll('#lines tbody tr').length")
        check("it shows measurements", total > 10, total)

        browser.run("[...document.querySelectorAll('#lines th button')].find(b => b.textContent === 'Speedup').click()")
        up = [float(x) for x in browser.run(SPEED) if x != "–"]
        browser.run("[...document.querySelectorAll('#lines th button')].find(b => b.textContent === 'Speedup').click()")
        down = [float(x) for x in browser.run(SPEED) if x != "–"]
        sort = browser.run("[...document.querySelectorAll('#lines th')].map(t => t.getAttribute('aria-sort')).join()")
        check("a heading sorts, up and then down", up == sorted(up) and down == sorted(up, reverse=True) and up[0] != up[-1]
              and sort.count("descending") == 1, [up[:5], down[:5], sort])
        check("what is missing comes last", browser.run(SPEED)[-1] == "–" or "–" not in browser.run(SPEED))
        browser.run("document.querySelector('#lines th button').focus()")
        browser.press("Enter", 13)
        check("a heading sorts by the keyboard", browser.run("document.querySelector('#lines th').getAttribute('aria-sort')") == "ascending")

        browser.run("(f => { f.value = 'decode auto'; f.dispatchEvent(new Event('input')); })(document.getElementById('filter'))")
        left = browser.run("[...document.querySelectorAll('#lines tbody tr')].map(r => r.textContent)")
        check("words filter the rows", 0 < len(left) < total and all("decode" in text for text in left), len(left))
        check("it says how many are left", browser.run("document.getElementById('shown').textContent").startswith(f"{len(left)} of {total} "))
        browser.run("(f => { f.value = 'nothinghasthis'; f.dispatchEvent(new Event('input')); })(document.getElementById('filter'))")
        check("a filter may leave nothing", browser.run("document.querySelectorAll('#lines tbody tr').length") == 0)
        browser.run("(f => { f.value = ''; f.dispatchEvent(new Event('input')); })(document.getElementById('filter'))")

        before = browser.run("document.getElementById('value').textContent")
        browser.point_at("#figure .point")
        after = browser.run("document.getElementById('value').textContent")
        check("pointing at a mark shows its values", after != before and " ms" in after and "nonzeros of A" in after, after)
        browser.run("document.getElementById('choose-measure').focus()")
        browser.press("Tab", 9)
        focused = browser.run("document.activeElement.getAttribute('aria-label')")
        check("a mark is reached with the Tab key", browser.run("document.activeElement.classList.contains('point')")
              and focused == browser.run("document.getElementById('value').textContent"), focused)
        shapes = browser.run("document.querySelectorAll('#choose-suite option').length")
        drawn = []
        for i in range(min(shapes, 4)):
            browser.run(f"(s => {{ s.selectedIndex = {i}; s.dispatchEvent(new Event('change')); }})(document.getElementById('choose-suite'))")
            drawn.append(browser.run("document.querySelectorAll('#figure .point').length + document.querySelectorAll('#figure p').length"))
        check("another suite draws another figure", shapes > 1 and all(drawn), drawn)
        browser.run("(s => { s.value = 'ms'; s.dispatchEvent(new Event('change')); })(document.getElementById('choose-measure'))")
        check("times are shown on demand", "Time of a call, ms" in browser.run("document.getElementById('figure').textContent"))
        inside = browser.run("[...document.querySelectorAll('#figure svg text, #figure svg .point')].every(e => { const r = e.getBoundingClientRect(),"
                             " s = e.ownerSVGElement.getBoundingClientRect(); return r.left >= s.left - 2 && r.right <= s.right + 2 && r.top >= s.top - 2 && r.bottom <= s.bottom + 2; })")
        check("nothing of the figure is cut off", inside)

        changes = browser.run("[...document.querySelectorAll('#changes tbody tr')].map(r => r.textContent)")
        check("two records are compared, what is slower is marked", sum("slower" in c for c in changes) == 1 and
              browser.run("document.querySelectorAll('#changes .slower').length") == 1 and "1 slower" in browser.run("document.getElementById('summary').textContent"), changes)
        browser.run("(f => { f.value = '90'; f.dispatchEvent(new Event('input')); })(document.getElementById('noise'))")
        check("more noise allows more", "0 slower" in browser.run("document.getElementById('summary').textContent"))

        wrong = browser.run(ACCESS)
        check("accessibility: names, labels, roles, contrast, headings, language", wrong == [], "\n".join(wrong))
        browser.picture(os.path.join(directory, "wide.png"))
        errors = browser.errors()
        check("nothing of this was an error", not errors, errors)

        browser.open(page, 390)
        check("at the width of a phone nothing sticks out", browser.run("document.documentElement.scrollWidth") <= 390,
              browser.run("[document.documentElement.scrollWidth, [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 391"
                          " && !e.closest('.scroll')).map(e => e.outerHTML.slice(0, 60)).slice(0, 5)].join(' | ')"))
        size = browser.run("parseFloat(getComputedStyle(document.querySelector('#figure text')).fontSize) * document.querySelector('#figure svg').getBoundingClientRect().width"
                           " / document.querySelector('#figure svg').viewBox.baseVal.width")
        check("there the figure's text is still readable", size >= 10, size)
        browser.point_at("#figure .point")
        check("there a mark shows its values, too", " ms" in browser.run("document.getElementById('value').textContent"))
        browser.picture(os.path.join(directory, "phone.png"))

        browser.open(hostile, 1200)
        errors = browser.errors()
        check("a record with text that would be markup loads without errors", not errors, errors)
        check("text of a record runs nothing", browser.run("typeof window.stolen") == "undefined"
              and browser.run("document.querySelectorAll('img, iframe, body script').length") == 2,
              browser.run("[typeof window.stolen, document.querySelectorAll('img, iframe, body script').length].join()"))
        text = browser.run("document.getElementById('lines').textContent")
        check("it is shown as it is", "</script><script>window.stolen=1</script>" in text and "<img src=x onerror=window.stolen=1>" in text
              and "\u2028" in text and "\"'&amp;\\" in text, text[:500])
        check("problems of a record are on the page", "is no JSON" in browser.run("document.getElementById('problems').textContent")
              and "version 9.9.9" in browser.run("document.getElementById('problems').textContent"))
    finally:
        browser.close()
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
