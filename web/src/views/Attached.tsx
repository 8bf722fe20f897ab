/** Files and pictures of a message, as they are shown in it. */

import { ChevronRight, FileText, ImageOff } from "lucide-preact";
import { useContext, useEffect, useState } from "preact/hooks";
import type { Medium } from "../api";
import { fileOf, SessionName } from "../attachments";
import { bytes, texts } from "../texts";
import { Dialog } from "./Dialog";

/** A text file: a card that opens to its text. */
export function FileCard({ name, text }: { name: string; text: string }) {
  return (
    <details class="file-card">
      <summary>
        <FileText size={18} strokeWidth={1.75} aria-hidden="true" />
        <span class="item-text">{name}</span>
        <span class="hint">{bytes(text.length)}</span>
        <ChevronRight size={15} class="turns-open" aria-hidden="true" />
      </summary>
      <pre tabIndex={0}>{text}</pre>
    </details>
  );
}

/** The URL of a file, of one in a message on its way, or of one that the server keeps under its digest. */
function useUrl(source: string | File): { url: string; isGone: boolean } {
  const session = useContext(SessionName);
  const [url, show] = useState("");
  const [isGone, lose] = useState(false);
  useEffect(() => {
    let made = "";
    let wanted = true;
    const found = source instanceof File ? Promise.resolve<Blob>(source) : fileOf(session, source);
    found.then(
      (blob) => wanted && show((made = URL.createObjectURL(blob))),
      () => wanted && lose(true),
    );
    return () => {
      wanted = false;
      if (made) URL.revokeObjectURL(made);
    };
  }, [source]);
  return { url, isGone };
}

/** A picture, of any of these. */
export function Picture({ source, name }: { source: string | File; name: string }) {
  const { url, isGone } = useUrl(source);
  if (isGone)
    return (
      <span class="picture gone" role="img" aria-label={texts.composer.pictureGone}>
        <ImageOff size={20} aria-hidden="true" />
      </span>
    );
  return url ? <img class="picture" src={url} alt={name} /> : <span class="picture" />;
}

function Sound({ source, name }: { source: string; name: string }) {
  const { url, isGone } = useUrl(source);
  if (isGone) return <span class="hint">{texts.composer.soundGone}</span>;
  return <audio controls src={url || undefined} aria-label={name} />;
}

/** Sounds and pictures of a message; a picture that is pressed is shown large. */
export function Pictures({ media }: { media: Medium[] }) {
  const [large, enlarge] = useState<number | null>(null);
  const sources = media.flatMap(([, source, kind]) => (kind === "sound" ? [] : [source]));
  const sounds = media.flatMap(([, source, kind]) => (kind === "sound" ? [source] : []));
  return (
    <div class="pictures">
      {sounds.map((source, at) => (
        <Sound key={source} source={source} name={texts.composer.sound(at + 1)} />
      ))}
      {sources.map((source, at) => (
        <button key={source} type="button" class="picture-button" aria-label={texts.composer.enlarge(at + 1)} onClick={() => enlarge(at)}>
          <Picture source={source} name={texts.composer.picture(at + 1)} />
        </button>
      ))}
      {large !== null && (
        <Dialog title={texts.composer.picture(large + 1)} onClose={() => enlarge(null)}>
          <Picture source={sources[large]!} name={texts.composer.picture(large + 1)} />
        </Dialog>
      )}
    </div>
  );
}
