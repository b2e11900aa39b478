// What the JavaScript SDK sends for a create and an isolated session without options.
import { pathToFileURL } from "node:url";

const { ConnectionConfig, Sandbox } = await import(pathToFileURL(process.env.NODE_SDK).href);

const box = await Sandbox.create({ connectionConfig: new ConnectionConfig({}), image: "host" });
await box.isolation.create({ workspace: { path: "/workspace" } });
await box.close();
