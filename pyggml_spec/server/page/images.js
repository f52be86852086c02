// Images that are dropped, pasted or chosen, as data URLs of a size that fits requests and the history.

const MOST_PIXELS = 1536, AS_IT_IS = 400_000; // of the longer side; bytes of a file that is sent unchanged
const TAKEN = ["image/jpeg", "image/png"]; // that the server decodes; others are converted here

const urlOf = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

/** The data URL of a file, made smaller where it has to be. Throws Error: it is no image. */
export async function dataUrl(file) {
  let image;
  try { image = await createImageBitmap(file); } catch { throw new Error(`${file.name || "This file"} is no image that this browser reads. Give a PNG, JPEG or WebP file.`); }
  const scale = Math.min(1, MOST_PIXELS / Math.max(image.width, image.height));
  if (scale === 1 && TAKEN.includes(file.type) && file.size <= AS_IT_IS) return urlOf(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const paint = canvas.getContext("2d");
  paint.fillStyle = "#fff"; // JPEG has no transparency
  paint.fillRect(0, 0, canvas.width, canvas.height);
  paint.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.88);
}

/** The files among what was dropped or pasted. */
export const filesOf = (transfer) => [...(transfer?.files ?? [])];
