import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, resolve } from "node:path";
import { defineConfig, type Plugin } from "vite";

const here = import.meta.dirname;

function files(folder: string): string[] {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) =>
    entry.isDirectory() ? files(join(folder, entry.name)) : [join(folder, entry.name)],
  );
}

/** Writes down of which sources the built files are: a test without Node compares them. */
function manifest(): Plugin {
  let out = "";
  return {
    name: "manifest",
    configResolved(config) {
      out = resolve(config.root, config.build.outDir);
    },
    closeBundle() {
      const digest = (path: string) => createHash("sha256").update(readFileSync(path)).digest("hex");
      const named = (root: string, paths: string[]) =>
        Object.fromEntries(
          paths.sort().map((path) => [relative(root, path).split("\\").join("/"), digest(path)]),
        );
      const sources = [
        ...files(join(here, "src")),
        ...["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"].map((name) =>
          join(here, name),
        ),
      ];
      const built = files(out).filter((path) => !path.endsWith("manifest.json"));
      const written = { sources: named(here, sources), built: named(out, built) };
      writeFileSync(join(out, "manifest.json"), JSON.stringify(written, null, 1) + "\n");
    },
  };
}

export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  plugins: [manifest()],
  build: {
    outDir: "../src/perdure/server/page",
    emptyOutDir: true,
    assetsDir: "page",
    // Under the policy of the page nothing may be inline.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
    chunkSizeWarningLimit: 300,
  },
});
