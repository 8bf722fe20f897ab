/** What two texts have in common, word by word. */

export interface Piece {
  text: string;
  changed: boolean;
}

const MOST = 2000;
/** Words of each text that are compared: the table has a cell for every pair. */

function words(text: string): string[] {
  return text.match(/\s*\S+|\s+$/g) ?? [];
}

function joined(parts: string[], kept: boolean[]): Piece[] {
  const found: Piece[] = [];
  parts.forEach((text, at) => {
    const last = found[found.length - 1];
    if (last && last.changed === !kept[at]) last.text += text;
    else found.push({ text, changed: !kept[at] });
  });
  return found;
}

export function difference(one: string, other: string): [Piece[], Piece[]] {
  const left = words(one);
  const right = words(other);
  const keptLeft = left.map(() => false);
  const keptRight = right.map(() => false);
  let start = 0;
  while (start < left.length && start < right.length && left[start] === right[start]) {
    keptLeft[start] = keptRight[start] = true;
    start += 1;
  }
  const height = Math.min(left.length - start, MOST);
  const width = Math.min(right.length - start, MOST);
  // The length of the longest common part of what is behind each pair of places.
  const longest = Array.from({ length: height + 1 }, () => new Uint16Array(width + 1));
  for (let i = height - 1; i >= 0; i -= 1)
    for (let j = width - 1; j >= 0; j -= 1)
      longest[i]![j] =
        left[start + i] === right[start + j]
          ? longest[i + 1]![j + 1]! + 1
          : Math.max(longest[i + 1]![j]!, longest[i]![j + 1]!);
  for (let i = 0, j = 0; i < height && j < width; ) {
    if (left[start + i] === right[start + j]) {
      keptLeft[start + i] = keptRight[start + j] = true;
      i += 1;
      j += 1;
    } else if (longest[i + 1]![j]! >= longest[i]![j + 1]!) i += 1;
    else j += 1;
  }
  return [joined(left, keptLeft), joined(right, keptRight)];
}
