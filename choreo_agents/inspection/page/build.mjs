// Builds a page, `node build.mjs run.html`: one file with its scripts and styles inside, which a content security policy
// names by their hashes.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFile, writeFile } from "node:fs/promises";

const common = { bundle: true, minify: true, write: false, legalComments: "inline", logLevel: "warning" };
const here = (path) => new URL(path, import.meta.url);
const bundled = async (entry, options) => {
  const made = await build({ entryPoints: [here(entry).pathname], ...common, ...options });
  return made.outputFiles[0].text.trim();
};
const hash = (text) => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;

const script = await bundled("src/main.js", { format: "iife", target: "es2022" });
const style = await bundled("src/style.css", {});
if (script.includes("</script")) throw new Error("the script would end itself");
const policy = [
  "default-src 'none'",
  `script-src ${hash(script)}`,
  `style-src ${hash(style)}`,
  "img-src data:",
  "base-uri 'none'",
  "form-action 'none'",
].join("; ");
const parts = { POLICY: policy, STYLE: style, SCRIPT: script };
const page = (await readFile(here("src/index.html"), "utf8")).replace(/\{\{([A-Z]+)\}\}/g, (all, name) => parts[name] ?? all);
await writeFile(process.argv[2], page);
