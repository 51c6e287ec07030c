// An InferencePool as its API reference has it, which no package does:
// https://gateway-api-inference-extension.sigs.k8s.io/reference/spec
export interface IInferencePool {
  apiVersion: "inference.networking.k8s.io/v1";
  kind: "InferencePool";
  metadata: { name: string; namespace?: string; labels?: Record<string, string> };
  spec: {
    selector: { matchLabels: Record<string, string> };
    targetPorts: { number: number }[];
    appProtocol?: "http" | "kubernetes.io/h2c";
    endpointPickerRef?: {
      group?: string;
      kind?: string;
      name: string;
      port?: { number: number };
      failureMode?: "FailOpen" | "FailClose";
    };
  };
}
