/** Files and pictures of a message, as they are shown in it. */

import { ChevronRight, FileText, ImageOff } from "lucide-preact";
import { useContext, useEffect, useState } from "preact/hooks";
import { pictureOf, SessionName } from "../attachments";
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

/** A picture: of a file, of a message on its way, or kept by the server under its digest. */
export function Picture({ source, name }: { source: string | File; name: string }) {
  const session = useContext(SessionName);
  const [url, show] = useState("");
  const [isGone, lose] = useState(false);
  useEffect(() => {
    let made = "";
    let wanted = true;
    const found = source instanceof File ? Promise.resolve<Blob>(source) : pictureOf(session, source);
    found.then(
      (blob) => wanted && show((made = URL.createObjectURL(blob))),
      () => wanted && lose(true),
    );
    return () => {
      wanted = false;
      if (made) URL.revokeObjectURL(made);
    };
  }, [source]);
  if (isGone)
    return (
      <span class="picture gone" role="img" aria-label={texts.composer.pictureGone}>
        <ImageOff size={20} aria-hidden="true" />
      </span>
    );
  return url ? <img class="picture" src={url} alt={name} /> : <span class="picture" />;
}

/** Pictures of a message; one that is pressed is shown large. */
export function Pictures({ sources }: { sources: string[] }) {
  const [large, enlarge] = useState<number | null>(null);
  return (
    <div class="pictures">
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
