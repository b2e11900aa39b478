// Tests of the published JavaScript SDK. Each prints {"its name": null}, or what went wrong.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const { ConnectionConfig, Sandbox, SandboxManager } = await import(pathToFileURL(process.env.NODE_SDK).href);

const connectionConfig = new ConnectionConfig({});
const tests = [];
const test = (name, body) => tests.push([name, body]);
const texts = (messages) => messages.map((message) => message.text);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const out = async (box, command) => texts((await box.commands.run(command)).logs.stdout).join("\n");

test("a sandbox is described", async (box) => {
  const info = await box.getInfo();
  assert.equal(info.status.state, "Running");
  assert.deepEqual(info.metadata, { from: "node" });
  assert.ok(info.expiresAt instanceof Date);
  assert.ok(await box.isHealthy());
});

test("the list is filtered by metadata", async (box) => {
  const manager = SandboxManager.create({ connectionConfig });
  const found = await manager.listSandboxInfos({ states: ["Running"], metadata: { from: "node" }, pageSize: 5 });
  assert.deepEqual(found.items.map((one) => one.id), [box.id]);
  await manager.close();
});

test("metadata is merged and null deletes", async (box) => {
  await box.patchMetadata({ extra: "1" });
  const info = await box.patchMetadata({ extra: null });
  assert.deepEqual(info.metadata, { from: "node" });
});

test("renew moves the end", async (box) => {
  const { expiresAt } = await box.renew(1800);
  assert.ok(Math.abs(new Date(expiresAt) - Date.now() - 1800_000) < 60_000);
});

test("one event is one line without its ending, and a blank line is a newline", async (box) => {
  const done = await box.commands.run("echo a; echo; echo b; printf end; echo err >&2");
  assert.deepEqual(texts(done.logs.stdout), ["a", "\n", "b", "end"]);
  assert.deepEqual(texts(done.logs.stderr), ["err"]);
  assert.equal(done.exitCode, 0);
  assert.ok(done.complete && !done.error && done.id);
});

test("512 lines are 512 events", async (box) => {
  const done = await box.commands.run("seq 512");
  assert.deepEqual(texts(done.logs.stdout), Array.from({ length: 512 }, (_, i) => String(i + 1)));
});

test("a failure has its exit code and no completion", async (box) => {
  const done = await box.commands.run("exit 3");
  assert.equal(done.exitCode, 3);
  assert.equal(done.error.name, "CommandExecError");
  assert.equal(done.complete, undefined);
});

test("directory, environment and timeout of one command", async (box) => {
  const done = await box.commands.run("echo $COLOUR in $PWD", { workingDirectory: "/var", envs: { COLOUR: "red" } });
  assert.deepEqual(texts(done.logs.stdout), ["red in /var"]);
  const late = await box.commands.run("sleep 30", { timeoutSeconds: 1 });
  assert.ok(late.error);
});

test("handlers see events as they come", async (box) => {
  const seen = [];
  await box.commands.run("echo 1; sleep 0.2; echo 2 >&2", undefined, {
    onInit: () => seen.push("init"),
    onStdout: () => seen.push("stdout"),
    onStderr: () => seen.push("stderr"),
    onExecutionComplete: () => seen.push("complete"),
  });
  assert.deepEqual(seen, ["init", "stdout", "stderr", "complete"]);
});

test("a background command has status and logs", async (box) => {
  const { id } = await box.commands.run("echo log; sleep 0.2; exit 4", { background: true });
  let status;
  do {
    await sleep(50);
    status = await box.commands.getCommandStatus(id);
  } while (status.running);
  assert.equal(status.exitCode, 4);
  const logs = await box.commands.getBackgroundCommandLogs(id);
  assert.equal(logs.content, "log\n");
});

test("interrupt ends a command", async (box) => {
  let ended;
  await box.commands.run("sleep 30", undefined, {
    onInit: (init) => { ended = box.commands.interrupt(init.id); },
  });
  await ended;
});

test("a session keeps its exports", async (box) => {
  const session = await box.commands.createSession({ workingDirectory: "/tmp" });
  await box.commands.runInSession(session, "export NAME=ada");
  const done = await box.commands.runInSession(session, "echo $NAME $PWD");
  assert.deepEqual(texts(done.logs.stdout), ["ada /tmp"]);
  await box.commands.deleteSession(session);
});

test("files are written, read, described, moved and deleted", async (box) => {
  await box.files.createDirectories([{ path: "/tmp/js", mode: 755 }]);
  await box.files.writeFiles([
    { path: "/tmp/js/a.txt", data: "grüße", mode: 640 },
    { path: "/tmp/js/b.bin", data: new Uint8Array([0, 255, 10]) },
  ]);
  assert.equal(await box.files.readFile("/tmp/js/a.txt"), "grüße");
  assert.deepEqual([...(await box.files.readBytes("/tmp/js/b.bin"))], [0, 255, 10]);
  assert.equal(await box.files.readFile("/tmp/js/a.txt", { range: "bytes=0-1" }), "gr");
  const info = (await box.files.getFileInfo(["/tmp/js/a.txt"]))["/tmp/js/a.txt"];
  assert.equal(info.mode, 640);
  assert.equal(info.owner, "root");
  assert.ok(info.modifiedAt instanceof Date);
  await box.files.moveFiles([{ src: "/tmp/js/a.txt", dest: "/tmp/js/c.txt" }]);
  await box.files.setPermissions([{ path: "/tmp/js/c.txt", mode: 600 }]);
  const counts = await box.files.replaceContentsDetailed([{ path: "/tmp/js/c.txt", oldContent: "g", newContent: "G" }]);
  assert.deepEqual(counts, [{ path: "/tmp/js/c.txt", replacedCount: 1 }]);
  await box.files.replaceContents([{ path: "/tmp/js/c.txt", oldContent: "G", newContent: "g" }]);
  assert.equal(await out(box, "stat -c %a /tmp/js/c.txt"), "600");
  const found = await box.files.search({ path: "/tmp/js", pattern: "*.txt" });
  assert.deepEqual(found.map((one) => one.path), ["/tmp/js/c.txt"]);
  const listed = await box.files.listDirectory({ path: "/tmp/js" });
  assert.deepEqual(listed.map((one) => one.path), ["/tmp/js/b.bin", "/tmp/js/c.txt"]);
  await box.files.deleteFiles(["/tmp/js/c.txt"]);
  await box.files.deleteDirectories(["/tmp/js"]);
  await assert.rejects(box.files.getFileInfo(["/tmp/js"]));
});

test("a stream is uploaded and downloaded", async (box) => {
  async function* pieces() {
    for (let i = 0; i < 64; i++) yield new Uint8Array(65536).fill(i);
  }
  await box.files.writeFiles([{ path: "/tmp/streamed", data: pieces() }]);
  let size = 0;
  for await (const piece of box.files.readBytesStream("/tmp/streamed")) size += piece.length;
  assert.equal(size, 64 * 65536);
});

test("metrics are possible numbers", async (box) => {
  const metrics = await box.getMetrics();
  assert.ok(metrics.cpuCount > 0 && metrics.memoryUsedMiB <= metrics.memoryTotalMiB);
});

test("an overlay session changes nothing outside", async (box) => {
  await box.commands.run("mkdir -p /workspace; echo base > /workspace/lower");
  const capabilities = await box.isolation.capabilities();
  assert.ok(capabilities.available && capabilities.diff_supported && capabilities.commit_supported);
  await box.isolation.withSession({ workspace: { path: "/workspace", mode: "overlay" } }, async (session) => {
    await session.files.writeFiles([{ path: "/workspace/api", data: "x" }]);
    assert.deepEqual(texts((await session.run("cat api; rm lower; ls")).logs.stdout), ["xapi"]);
    await assert.rejects(session.files.getFileInfo(["/workspace/lower"]));
    const failed = await session.run("(exit 9)");
    assert.equal(failed.exitCode, 9);
    assert.equal(failed.error.name, "ExitError");
    const again = await box.isolation.attach(session.sessionId);
    assert.equal(again.info.workspace.path, "/workspace");
    assert.equal((await again.get()).status, "active");
    assert.equal((await box.isolation.list()).length, 1);
  });
  assert.equal(await out(box, "ls /workspace"), "lower");
  const once = await box.isolation.runOnce("echo once", "/workspace");
  assert.deepEqual(texts(once.logs.stdout), ["once"]);
});

test("the egress policy is read and patched", async (box) => {
  await box.patchEgressRules([{ action: "allow", target: "good.example" }]);
  const policy = await box.getEgressPolicy();
  assert.equal(policy.defaultAction, "deny");
  assert.deepEqual(policy.egress, [{ action: "allow", target: "good.example" }]);
  await box.deleteEgressRules(["good.example"]);
});

test("a paused sandbox is not healthy, and a resumed one is", async (box) => {
  await box.pause();
  assert.equal((await box.getInfo()).status.state, "Paused");
  assert.equal(await box.isHealthy(), false);
  const resumed = await box.resume();
  assert.ok(await resumed.isHealthy());
});

test("a wrong key is refused and is not health", async (box) => {
  const wrong = new ConnectionConfig({ apiKey: "wrong" });
  await assert.rejects(Sandbox.connect({ sandboxId: box.id, connectionConfig: wrong }), /401|key/i);
});

test("an unknown image is an error with the server's words", async () => {
  await assert.rejects(Sandbox.create({ connectionConfig, image: "nobody/knows:this" }), /nobody\/knows:this/);
});

const box = await Sandbox.create({
  connectionConfig,
  image: "host",
  timeoutSeconds: 600,
  metadata: { from: "node" },
  networkPolicy: { defaultAction: "deny", egress: [] },
});
try {
  for (const [name, body] of tests) {
    let fault = null;
    try {
      await body(box);
    } catch (error) {
      fault = String(error.stack ?? error);
    }
    console.log(JSON.stringify({ [name]: fault }));
  }
} finally {
  await box.kill();
  await box.close();
}
